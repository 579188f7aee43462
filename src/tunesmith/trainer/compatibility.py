"""Writes docs/reference/trainer_compatibility.md from the tables: `python -m tunesmith.trainer.compatibility`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from tunesmith.run.writing import write_file
from tunesmith.trainer.arguments import DROPPED, MOVED, RENAMED
from tunesmith.trainer.fields import ACCELERATOR, FIELDS
from tunesmith.trainer.upstream import library
from tunesmith.trainer.validation import NOT_CALLED, PROVIDED

HEAD = """# Trainer compatibility

Replace `from transformers import Trainer` by `from tunesmith import Trainer`; the rest of the script stays as it is.
This page is made from code (`python -m tunesmith.trainer.compatibility docs/reference/trainer_compatibility.md`), and
tests check every line of it.

Hugging Face's example scripts were run by hand with both Trainers, changing only the import line, on MRPC with a small model:
`run_glue.py` for transformers 5 (by task name from a local Hub server, and from csv and json files), and
`run_classification.py` (classification and regression from csv files). The latter is not the original file: it was
reconstructed from version 4.48 and later ones, without the search for an old checkpoint, which reads a field that
transformers 5 no longer has, and with shorter help texts. Both scripts were copied by hand.
With the same order of rows and without dropout, the losses and metrics of both Trainers were equal in all six printed
digits. With dropout and each Trainer's own random order they differ from run to run: evaluation loss of the same model over ten
seeds (160 rows, 120 evaluated) 0.598 ± 0.008 here and 0.605 ± 0.009 there, accuracy 0.703 ± 0.008 and 0.708 ± 0.009 (mean ±
standard deviation); over three other seeds with 600 rows 0.609 and 0.604. Metric keys are the same, and so are files except
`training_args.json` (theirs is a `.bin`), `journal.jsonl`, `.lock` and `.written`. `evaluate.load` fetches metrics from the
Hub; offline, it takes a folder of that name beside the script (`accuracy/accuracy.py`). Labels that are words in a csv file end
`run_classification.py` with both Trainers (`too many dimensions 'str'`). The permanent tests are scripts of our own with the same
calls: `tests/equivalence/test_trainer_example_script.py`, and `test_trainer_task_scripts.py` with a multi-label task (float
labels, a sigmoid threshold in `compute_metrics`) and a regression on pairs, where every logged loss and metric is the same.

Intended differences:

| here | transformers |
| --- | --- |
| A loss or gradient that is not finite stops the run (`NumericsError`); the weights stay as before. | It is logged as 0.0. |
| fp16: so does a NaN loss, or a gradient that overflows at every scale (decision 0008). | Updates are skipped without end. |
| Gradient accumulation divides once, by the items of the whole window. | The means of micro-batches of an encoder are added up. |
| `predict` returns rows in the order of the dataset. | With length grouping they come back in another order. |
| `eval_loss` is the mean over rows, also with batches of a custom `get_eval_dataloader`. | Each batch's mean weighs the same. |
| A checkpoint is a sealed folder of safetensors and JSON; verified, it resumes bit for bit. | Pickles; damage is not noticed. |
| A checkpoint that transformers wrote is refused: load it with `from_pretrained` and start a new run. | It resumes. |
| What a callback changes in a checkpoint in `on_save` is sealed anew, with a warning; a resume names it. | It is not noticed. |
| `load_best_model_at_end` needs intact weights; another file that changed is a warning. | It is not noticed. |
| Weights split into shards (`model.safetensors.index.json`) resume if they are the same tensors, bit for bit. | Not compared. |
| `dataloader_drop_last` drops training rows only. | Rows are left out of evaluations and predictions, too. |
| A resume with other data, model, tokenizer or maths is refused unless `Trainer.allow_changed_data = True`. | It is resumed. |
| The order of an epoch depends on `seed` (or `data_seed`) and the epoch alone. | It depends on the generator's history. |
| A checkpoint of `save_only_model` cannot be resumed: refused. | It resumes with a new optimizer, without a warning. |
| `training_args.json`, `optimizer.safetensors`, `state.json`. | `training_args.bin`, `optimizer.pt`, `scheduler.pt`. |
| An optimizer whose state is more than numbers, text, tensors, lists and dicts is refused at a save. | It is pickled. |
| `hyperparameter_search` leaves the best trial's model, values, checkpoints. | No model; every trial's checkpoints. |
| Early-stopping counters survive a resume. | Only with `restore_callback_states_from_checkpoint`. |
| Rows of an Arrow dataset with `DataCollatorWithPadding` train without padding. Off: `Trainer.use_speed_ups = False`. | Padded. |
| On one GPU steps are replayed as CUDA graphs, unless a callback or hook takes part in them (decision 0110). | They are not. |
| `total_flos` counts the tokens that were computed, so no padding there. | Padding is counted. |
| A stop that a callback asks for before the first step means no step. | One step. |
| A stop asked for inside an accumulated step comes at its end. | The half of the step is dropped. |
| A stream that is empty before `max_steps` ends the run with a warning. | `ValueError` (a batch without data). |
| With `auto_find_batch_size` a resume ends at `max_steps`. | It may take a step more. |
| Two stateful callbacks of one class are stored once each. | Once more with every checkpoint; a resume finds the oldest. |
| A data-loader worker that dies, fails or hangs (`Trainer.worker_timeout`) is a `WorkerError` with its rows. | It may hang. |
| `journal.jsonl` in the output folder holds every step: `tunesmith curves` and `tunesmith diagnose` read it. | - |
| `.lock` in the output folder keeps a second run out; `.written` lists the files that are ours. | - |
| README.md, results or state of the user there stay: ours are `README.tunesmith.md` and the like. | Replaced. |
| `save_model` over files it did not save, and a run over foreign checkpoints or a foreign journal: refused. | Replaced. |
| An output folder that is removed, renamed or replaced while training ends the run at the next save. | It is made again. |
| `isinstance(trainer, transformers.Trainer)` is False: a class of its own, with the same methods and attributes. | True. |
| The first log line after a resume is the mean of all its steps, as without the break. | Of the steps since the resume. |
| `learning_rate` of a log line is the rate that the optimizer used, also where a callback set it. | The scheduler's. |
| A method that nothing calls here, put into a subclass or on the object, is refused. | It takes part. |
| `create_optimizer_and_scheduler` of a subclass makes the optimizer and the scheduler. | It is never called. |

`train_loss` of a resumed run is the mean over the steps of that call, in both. Arguments, callbacks, `TrainerState`,
`TrainerControl` and the results of `train`, `evaluate` and `predict` are transformers' own classes: `isinstance` holds there.

## PEFT

Models of `get_peft_model`, with `task_type` or without, and models with `model.add_adapter` train as in transformers:
losses of LoRA, DoRA, IA3, VeRA, AdaLoRA, prompt and prefix tuning, a prompt encoder, trained biases and several adapters
are within 2e-5 (`tests/equivalence/test_peft.py`). The columns and label names are those of the model inside.

| here | transformers |
| --- | --- |
| `save_model` and checkpoints hold PEFT's files: `adapter_model.safetensors`, `adapter_config.json`; sealed. | The same files. |
| `trained.safetensors` in a checkpoint: what else is trained (norms unfrozen by hand, a prompt's encoder). | It is lost. |
| A resume brings back all adapters, `modules_to_save` and the above, bit for bit. | Adapters alone. |
| `load_best_model_at_end` does the same, for every kind. | The first active adapter; a prompt may end in an error. |
| A checkpoint of adapters does not resume into a model without them, or with others (`CheckpointError`). | Not compared. |
| `PeftMixedModel`: the whole model in `model.safetensors`, as PEFT has no files for it. | The same. |
| Rows are padded: the speed-ups do not know the wrapper. With `model.add_adapter` recognition decides. | Padded. |

State that PEFT keeps in Python alone (the importance scores of AdaLoRA between two calls of `update_and_allocate`) is in no
checkpoint, here or there.
"""

TESTS_HEAD = """## transformers' own tests

The tests of its Trainer (`tests/trainer`, in one process on a CPU) were run with both Trainers on 5.22.2. No package has them:
they are stored copies of the 5 series, written out again by hand, with tiny local models and texts for those of the Hub; a few
that ask for a GPU or are skipped there were run as well. Of the {tried} with a Trainer or TrainingArguments in them that pass
there, {passed} pass here; tests of samplers, trackers and callbacks alone are the same code in both and not counted. What the
others want is different here by design. `tests/equivalence/test_trainer_side_by_side.py`, `test_trainer_overrides.py` and
`tests/unit/trainer` keep what they assert in our own words.

| test | why it does not pass here |
| --- | --- |"""
PASSED, TRIED = 149, 159
_FILES = "looks for `training_args.bin`, `optimizer.pt` and `scheduler.pt`; with our names of the files all else in it passes"
FAILING_TESTS = {
    "TrainerCheckpointSaveTest.test_save_checkpoints": _FILES,
    "TrainerBestModelTest.test_save_best_checkpoint": _FILES + ", but for the count of entries as below",
    "TrainerBestModelTest.test_load_best_model_at_end": _FILES,
    "TrainerBestModelTest.test_load_best_model_from_safetensors": _FILES,
    "TrainerBestModelTest.test_best_model_checkpoint_behavior": "counts the entries of the output folder: `.lock`, "
    "`.written` and `journal.jsonl` lie beside the checkpoints",
    "TrainerCheckpointSaveTest.test_save_collator_tokenizer_by_default": "takes the first entry of the output folder for a "
    "checkpoint: it passes or fails with the order in which the file system lists them (it passed, and is counted so)",
    "TrainerResumeTrainingTest.test_resume_training_with_different_batch_size": "a resume with another batch size is refused, "
    "but for `Trainer.allow_changed_data = True`",
    "TrainerCheckpointRotationTest.test_compare_trainer_and_checkpoint_args_logging": "a resume with other data and another "
    "batch size is refused",
    "TrainerLoggingTest.test_logging_inf_nan_filter": "wants a loss of nan to be logged; here it stops the run",
    "TrainerGradientAccumulationTest.test_num_batches_in_training_with_gradient_accumulation": "replaces `get_batch_samples`, "
    "which is refused: the loop is the engine's",
    "JITCheckpointTest.test_integration_with_trainer": "looks for `JITCheckpointCallback` among the callbacks; "
    "`enable_jit_checkpoint` is the engine's own here",
}
"""Tests of transformers that pass there and not here, each with its reason."""


def render() -> str:
    """The whole page."""
    lines = [HEAD, "## TrainingArguments", "", "| field | default | status | note |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(library.TrainingArguments):
        entry = FIELDS[field.name]
        status = "honoured" if entry.allowed is None else "some values"
        if entry.note == "refused when set":
            status = "refused"
        note = entry.note if entry.allowed is None else f"{entry.note}. Otherwise: {entry.instead}"
        note = entry.instead if status == "refused" else note
        lines.append(f"| `{field.name}` | `{_default(field)!r}` | {status} | {_cell(note)} |")
    lines += ["", "### accelerator_config", "", "| value | effect |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(effect)} |" for name, effect in ACCELERATOR.items()]
    lines += ["", "## Old names", "", "`tunesmith.TrainingArguments` accepts them with a one-line note.", ""]
    lines += ["| old name | now |", "| --- | --- |"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += [
        "| `warmup_ratio` | `warmup_steps` below 1 |",
        "| `group_by_length` | `train_sampling_strategy='group_by_length'` |",
        "| `include_inputs_for_metrics` | `include_for_metrics=['inputs']` |",
        "| `tokenizer=` of the Trainer | `processing_class=` |",
    ]
    lines += [f"| `{old}` | `accelerator_config={{'{old}': ...}}` |" for old in MOVED]
    lines += [f"| `{old}` | left out: {_cell(why)} |" for old, why in DROPPED.items()]
    lines += ["", "## Methods", "", "| method | status | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | honoured | {_cell(note) or 'as in transformers'} |" for name, note in PROVIDED.items()]
    lines += [f"| `{name}` | an override is refused | {_cell(why)} |" for name, why in NOT_CALLED.items()]
    lines += ["", TESTS_HEAD.format(passed=PASSED, tried=TRIED)]
    lines += [f"| `{name}` | {why} |" for name, why in FAILING_TESTS.items()]
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return getattr(field.default, "value", field.default)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), render().encode())
