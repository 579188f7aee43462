"""One finished model as a service: texts in, labels and probabilities out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.errors import ConfigError
from tunesmith.run.layout import RunDir
from tunesmith.serve.pages import model_facts
from tunesmith.serve.routes import answer_texts, refuse_in_json
from tunesmith.serve.tryit import Classifier


class PredictionService:
    """The handlers of `tunesmith serve`."""

    def __init__(self, run: RunDir, classifier: Classifier | None = None) -> None:
        self.run = run
        self.classifier = classifier or Classifier()
        if model_facts(run) is None:
            raise ConfigError(
                "holds no finished model", where=str(run.path), fix="Give a run that has ended, with its model/ folder."
            )

    def routes(self) -> list[Route]:
        """Every route of the service."""
        return [
            Route("/health", refuse_in_json(self._health), methods=["GET"]),
            Route("/predict", refuse_in_json(self._predict), methods=["POST"]),
        ]

    async def close(self) -> None:
        """Nothing waits here that does not end by itself."""

    def stop(self) -> None:
        """Ends the model's thread."""
        self.classifier.close()

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"run": self.run.name, **(model_facts(self.run) or {})})

    async def _predict(self, request: Request) -> Response:
        return await answer_texts(request, self.run, self.classifier)
