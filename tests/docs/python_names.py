"""docs/reference/python.md: every public name of tunesmith with its signature, its docstring and an example that runs.

PYTHONPATH=tests python tests/docs/python_names.py      # writes the page
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md"

GROUPS: list[tuple[str, str, str]] = [
    (
        "From a table to predictions",
        "TextClassifier TextRegressor finetune Predictor sample_file find_embedded",
        """
import pandas as pd
from tunesmith import Predictor, TextClassifier, TextRegressor, find_embedded, finetune, sample_file

frame = pd.read_csv(sample_file("train"))[:24]                # a paraphrase set that comes with tunesmith
pairs = frame[["sentence1", "sentence2"]]
quick = {"model_name_or_path": str(find_embedded()), "max_steps": 1, "options": {"recipe": "hf", "use_cpu": True}}

model = TextClassifier(**quick).fit(pairs, frame["label"])
print(model.predict(pairs[:2]), model.score(pairs, frame["label"]))
print(TextRegressor(**quick).fit(frame["sentence1"], frame["sentence1"].str.len()).predict(["how long is this?"]))

result = finetune(frame, output_dir="run", max_steps=2, recipe="hf", use_cpu=True)      # any option of `tunesmith train`
print(Predictor.load("run", use_cpu=True).predict_proba([("A cat sat.", "A cat was sitting.")]))
""",
    ),
    (
        "Options and data",
        "RunConfig load_config load_dataset",
        """
from tunesmith import RunConfig, load_config, load_dataset
from tunesmith.errors import ResourceError

config = load_config(None, {"train_file": "pairs.csv", "learning_rate": "3e-5"})        # all problems at once, or a config
assert isinstance(config, RunConfig) and config.learning_rate == 3e-5

try:
    splits = load_dataset("glue", "mrpc")                     # from the Hub; without a network from its copy on disk
except ResourceError as problem:
    print(problem)
""",
    ),
    (
        "The Trainer",
        "Trainer TrainingArguments TrainerCallback EarlyStoppingCallback EvalPrediction "
        "DataCollatorWithPadding set_seed get_scheduler",
        """
import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from tunesmith import (
    DataCollatorWithPadding, EarlyStoppingCallback, EvalPrediction, Trainer, TrainerCallback, TrainingArguments,
    get_scheduler, make_optimizer, set_seed,
)

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(find_embedded())
rows = Dataset.from_list([{**tokenizer(row.sentence1), "label": int(row.label == "equivalent")} for row in frame.itertuples()])
network = AutoModelForSequenceClassification.from_pretrained(find_embedded())


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 2


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


args = TrainingArguments("trainer", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, use_cpu=True,
                         load_best_model_at_end=True, report_to="none", disable_tqdm=True)
optimizer = make_optimizer(network, learning_rate=5e-5)
trainer = Trainer(
    network, args, DataCollatorWithPadding(tokenizer), rows, rows.select(range(8)), processing_class=tokenizer,
    compute_metrics=accuracy, callbacks=[Stop(), EarlyStoppingCallback(3)],
    optimizers=(optimizer, get_scheduler("linear", optimizer, 0, 9)),
)
assert trainer.train().global_step == 2
""",
    ),
    (
        "The loop and its parts",
        "train_events TrainState Plan Calendar Schedule lr_at epoch_ends_for Batches Padding padding_of TokenRows TaskLoss "
        "make_optimizer make_runtime apply_speedups predict_rows Identity save_checkpoint load_checkpoint Console",
        """
from pathlib import Path
from tunesmith import (
    Batches, Calendar, Console, Identity, Padding, Plan, Schedule, Task, TaskLoss, TokenRows, TrainState, apply_speedups,
    epoch_ends_for, load_checkpoint, lr_at, make_runtime, padding_of, predict_rows, save_checkpoint, train_events,
)

token_rows = TokenRows.from_lists({"input_ids": rows["input_ids"], "labels": rows["label"]})
padding = padding_of(tokenizer)
assert isinstance(padding, Padding)
runtime = make_runtime(use_cpu=True)
speedups = apply_speedups(network, token_rows, padding, device=runtime.device)  # faster, with the same results
batches = Batches(token_rows, speedups.train_collate, batch_size=4, seed=0)
steps, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=2, num_epochs=1)
plan = Plan(steps, ends, Schedule("linear", 5e-5, 0, steps), seed=0, evaluate=Calendar("no"))
print([lr_at(step, plan.schedule) for step in range(steps)])

state = TrainState(network, make_optimizer(network, learning_rate=5e-5), TaskLoss(Task.BINARY, 2), runtime, speedups=speedups)
console = Console(bars=False)
events = []
for event in train_events(state, batches, plan):
    console.on(event)
    events.append(event)
console.close()
print(predict_rows(state.model, token_rows, padding, runtime).logits.shape)

folder = Path("mine/checkpoint-2")
save_checkpoint(folder, state, Identity("mine", "24 rows", {}, {}, {}))
load_checkpoint(folder, state)
""",
    ),
    (
        "Curves and what they mean",
        "Curves load_curves curves_from_events draw_curves diagnose_curves",
        """
from tunesmith import Curves, curves_from_events, diagnose_curves, draw_curves, load_curves

curves = load_curves("run")                                   # the run that finetune made above
assert isinstance(curves, Curves)
draw_curves([curves, curves_from_events(events, name="by hand")]).savefig("curves.png")
print(diagnose_curves(curves, {"learning_rate": 5e-5})[0])
""",
    ),
    (
        "Metrics",
        "load_metric make_suite Task",
        """
from tunesmith import Task, load_metric, make_suite

print(load_metric("glue", "mrpc").compute(predictions=[0, 1, 1], references=[0, 1, 0]))  # no network needed
print(make_suite(Task.REGRESSION).names)
""",
    ),
]
"""Title, names, example. Examples run in the order of the page, in one namespace."""


def python_page() -> str:
    """The page, from the code."""
    import tunesmith

    lines = [
        "# Every public name",
        "",
        "`from tunesmith import ...`: signature, meaning and an example. Made by `python tests/docs/python_names.py`",
        "from the code; the examples run in the tests, top to bottom. `tunesmith.__version__` is the version.",
    ]
    for title, names, example in GROUPS:
        lines += ["", f"## {title}", "", "```python", example.strip(), "```"]
        for name in names.split():
            lines += ["", f"### `{name}`", "", *_describe(name, getattr(tunesmith, name))]
    return "\n".join(lines) + "\n"


def _describe(name: str, thing: Any) -> list[str]:
    if thing.__module__.startswith("transformers"):
        first = re.split(r"\n\s*\n", inspect.getdoc(thing) or "")[0]
        return [f"The one of transformers. {' '.join(first.split())}"]
    text = re.split(r"\n\s*>>>", inspect.getdoc(thing) or "")[0].rstrip()
    if name == "RunConfig":
        signature = "(*, name=value, ...)"
        text += " [Every option](config.md)."
    elif name == "Task":
        return [f"{text} {', '.join(f'`Task.{member.name}`' for member in thing)}."]
    else:
        signature = _signature(thing)
    out = ["```text", f"{name}{signature}", "```", "", text]
    for method, found in _methods(thing) if inspect.isclass(thing) and name not in ("Trainer", "RunConfig") else ():
        first = (inspect.getdoc(found) or "").split("\n\n")[0]
        how = re.sub(r"^\((self|cls)(, )?", "(", _signature(found))
        out += [*([""] if out[-1] == text else []), f"- `.{method}{how}`: {' '.join(first.split())}"]
    if name == "Trainer":
        out += ["", "[TrainingArguments and Trainer, field by field](trainer_compatibility.md)."]
    return out


def _methods(thing: type) -> list[tuple[str, Any]]:
    """Public methods that tunesmith defines."""
    found: dict[str, Any] = {}
    for kind in thing.__mro__:
        if kind.__module__.startswith("tunesmith"):
            for name, value in vars(kind).items():
                value = getattr(value, "__func__", value)
                if not name.startswith("_") and inspect.isfunction(value) and value.__module__.startswith("tunesmith"):
                    found.setdefault(name, value)
    return sorted(found.items())


def _signature(thing: Any) -> str:
    text = str(inspect.signature(thing)).replace("'", "")
    text = re.sub(r"<function <lambda> at \w+>|<factory>", "...", text)
    return text.replace(" -> None", "")


if __name__ == "__main__":
    PAGE.write_text(python_page(), encoding="utf-8")
