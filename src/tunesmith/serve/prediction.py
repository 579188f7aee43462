"""One finished model as a service: texts in, labels and probabilities out."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.model.seal import check_seal
from tunesmith.predict.facts import FACTS_FILE
from tunesmith.run.layout import RunDir
from tunesmith.serve.pages import model_facts
from tunesmith.serve.routes import answer_texts, refuse_in_json
from tunesmith.serve.tryit import Classifier, model_marks


class PredictionService:
    """The handlers of `tunesmith serve`."""

    def __init__(self, run: RunDir, classifier: Classifier | None = None) -> None:
        self.run = run
        self.classifier = classifier or Classifier()
        if model_facts(run) is None:
            raise ConfigError(
                "holds no finished model", where=str(run.path), fix="Give a run that has ended, with its model/ folder."
            )
        check_seal(run.model)
        self._marks = model_marks(run)
        self._problem: str | None = None

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
        problem = await asyncio.to_thread(self._find_problem)
        if problem is not None:
            return JSONResponse({"run": self.run.name, "error": problem}, 503)
        return JSONResponse({"run": self.run.name, **(model_facts(self.run) or {})})

    def _find_problem(self) -> str | None:
        """Why the model on disk cannot be used; files that changed since the last time are hashed, once."""
        marks = model_marks(self.run)
        if marks != self._marks:
            self._marks, self._problem = marks, None
            if not marks:
                self._problem = "model/ is gone"
            elif model_facts(self.run) is None:
                self._problem = f"model/{FACTS_FILE} cannot be read"
            else:
                try:
                    check_seal(self.run.model)
                except (CheckpointError, OSError) as error:
                    self._problem = error.line() if isinstance(error, CheckpointError) else str(error.strerror)
        return self._problem

    async def _predict(self, request: Request) -> Response:
        return await answer_texts(request, self.run, self.classifier)
