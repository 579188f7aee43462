"""Facts of the GLUE tasks: which columns hold the text, what the label ids are called, which splits there are."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class GlueTask:
    """`labels` are in id order; none for a score."""

    name: str
    text: tuple[str, ...]
    labels: tuple[str, ...] = ()

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score."""
        return not self.labels


GLUE_TASKS = {
    task.name: task
    for task in (
        GlueTask("cola", ("sentence",), ("unacceptable", "acceptable")),
        GlueTask("mnli", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
        GlueTask("mrpc", ("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
        GlueTask("qnli", ("question", "sentence"), ("entailment", "not_entailment")),
        GlueTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate")),
        GlueTask("rte", ("sentence1", "sentence2"), ("entailment", "not_entailment")),
        GlueTask("sst2", ("sentence",), ("negative", "positive")),
        GlueTask("stsb", ("sentence1", "sentence2")),
        GlueTask("wnli", ("sentence1", "sentence2"), ("not_entailment", "entailment")),
    )
}


def find_glue_task(name: str | None) -> GlueTask | None:
    """The task, or None for None; an unknown name is a ConfigError with the nearest one."""
    if name is None:
        return None
    task = GLUE_TASKS.get(name.lower().replace("-", "").replace("sts_b", "stsb").replace("sst_2", "sst2"))
    if task is None:
        known = tuple(GLUE_TASKS)
        raise ConfigError(f"--task_name {name!r} is not one of {', '.join(known)}", fix=did_you_mean(name, known))
    return task
