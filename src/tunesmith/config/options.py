"""The options of a run: name, type, range, default and help. This table is the only place where an option is described:
flags, config files, the reference page and the JSON schema are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tunesmith.config.convert import (
    OPTIMIZERS,
    SCHEDULE_OPTIONS,
    AutoOnOff,
    FromOne,
    FromZero,
    GlueTaskName,
    NotNegative,
    Positive,
    Range,
    Seed,
    Share,
    Steps,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field for each option, the string under it is its help, the comment over the first of a section its title."""

    # Data
    train_file: str | None = None
    """Training rows: csv, tsv, jsonl, xlsx, parquet or arrow, also gzipped (.gz)."""
    validation_file: str | None = None
    """Rows to evaluate on while training. Without it a part of the training rows is held out."""
    test_file: str | None = None
    """Rows to evaluate (labelled) or predict (unlabelled) once, at the end."""
    task_name: GlueTaskName | None = None
    """Name of a GLUE task, instead of files."""
    dataset_name: str | None = None
    """Hub id of a dataset, or a folder written by `save_to_disk`, instead of files."""
    dataset_config_name: str | None = None
    """Configuration of `dataset_name`, such as mrpc of glue."""
    train_split_name: str | None = None
    """Split of the dataset to train on. Default: train."""
    validation_split_name: str | None = None
    """Split of the dataset to evaluate on. Default: validation, or the nearest to it that exists."""
    test_split_name: str | None = None
    """Split of the dataset used as the test set. Default: test, where it exists."""
    validation_split_fraction: Share = 0.1
    """Share of the training rows held out (seeded, stratified) when there is no validation set. 0: none."""
    folds: Annotated[int, Range(at_least=2, at_most=1000)] | None = None
    """Cross-validation: number of models to train, each evaluated on the training rows that were held out from it."""
    fold: FromOne | None = None
    """With folds: train only the model of this fold."""
    seeds: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    """Number of models to train, with `seed`, `seed` + 1 and so on: how much the score depends on chance."""
    max_train_samples: FromOne | None = None
    """Use at most this many training rows, drawn with the seed; each label keeps its share."""
    max_eval_samples: FromOne | None = None
    """Use at most this many validation rows, drawn in the same way."""
    max_predict_samples: FromOne | None = None
    """Use at most this many test rows, drawn in the same way."""

    # Columns and reading
    text_column_names: tuple[str, ...] | None = None
    """One column name, or two for a sentence pair. Default: found in the data."""
    label_column_name: str | None = None
    """Column with the label, or several 0/1 columns with commas. Default: found in the data."""
    label_separator: str | None = None
    """What separates labels in one cell: a character, comma, semicolon, pipe, slash, or none. Default: found in the data."""
    positive_label: str | None = None
    """Class whose F1, precision and recall are reported (two classes). Default: 1 of 0/1 labels, else the rarer class."""
    merge_label_variants: bool = False
    """Labels that differ only in case, spaces, Unicode form or invisible characters are one: the most frequent spelling."""
    split_column_name: str | None = None
    """Column that says train, validation or test; none: ignore it. Default: one named split, set, subset or partition."""
    skip_bad_rows: bool = False
    """Leave out rows without text or label, or with other fields than the header; bad_rows.jsonl of the run lists them."""
    label_names: tuple[str, ...] | None = None
    """All label names, in id order. Default: the sorted names of the training rows, of two the positive one second."""
    do_regression: bool | None = None
    """The label is a number to predict (true) or a name even if it looks like one (false). Default: found in the data."""
    encoding: str | None = None
    """Text encoding of the files, such as cp1252. Default: UTF-8, or what the byte order mark says."""
    delimiter: str | None = None
    """Column separator of csv and tsv files. Default: by the suffix, checked against the header."""
    quoting: Literal["minimal", "none"] | None = None
    """Quotes in csv and tsv: minimal as in RFC 4180, none = a quote is a plain character. Default: csv minimal, tsv none."""
    sheet_name: str | None = None
    """Sheet of a spreadsheet. Default: the one that holds a table."""
    allow_single_label: bool = False
    """Train even when every row has the same label."""
    allow_empty_text: bool = False
    """Keep rows whose text is empty instead of refusing the file."""
    labels_file: str | None = None
    """Corrected labels of training rows: a review file of `tunesmith audit` whose column label was edited."""
    strict_data: bool = False
    """Refuse data about which the audit has a warning (exit code 3) instead of training on it."""
    allow_changed_data: bool = False
    """Resume although the data is not what the checkpoint was made from; the run records it."""

    # Tokens and batches
    max_seq_length: Annotated[int, Range(at_least=3)] | None = None
    """Cut inputs to this many tokens. Default: what the model can take, at most 512."""
    long_texts: Literal["auto", "head", "head_tail", "windows", "full"] = "auto"
    """What the model sees of a longer row: its head, head and tail, windows, or all it can take. Default: by the recipe."""
    pad_to_max_length: bool = False
    """Pad every input to `max_seq_length` instead of the longest of its batch."""
    pad_to_multiple_of: Annotated[int, Range(at_least=1, at_most=4096)] | None = None
    """Round the padded length up to a multiple of this."""
    preprocessing_num_workers: Annotated[int, Range(at_least=1, at_most=1024)] | None = None
    """Processes used for tokenizing. Default: one, whose tokenizer uses all cores."""
    overwrite_cache: bool = False
    """Tokenize again although a cached result exists."""
    cache_dir: str | None = None
    """Folder for tables, tokens and downloads. Default: ~/.cache/tunesmith, and the caches of Hugging Face for downloads."""
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] | None = None
    """Order of the training rows. Default: group_by_length (similar lengths in one batch); random on a GPU without padding."""
    shuffle_window: FromOne = 50
    """Length grouping sorts within this many batches, not the whole epoch."""
    token_budget: FromOne | None = None
    """Fill a training batch up to this many tokens instead of a fixed number of rows."""
    dataloader_num_workers: FromZero = 0
    """Batches that a thread prepares ahead of the training step; 0: none, and 2 on a GPU."""
    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch when it is not full."""
    dataloader_pin_memory: bool = True
    """Pin batches in memory before they go to a GPU."""

    # Model
    model_name_or_path: str | None = None
    """Folder or Hub id of an encoder; with recipe best several, with commas. Default: the embedded all-MiniLM-L6-v2."""
    config_name: str | None = None
    """Folder or Hub id of another model config. Default: that of the model."""
    tokenizer_name: str | None = None
    """Folder or Hub id of another tokenizer. Default: that of the model."""
    model_revision: str = "main"
    """Branch, tag or commit of a Hub model."""
    ignore_mismatched_sizes: bool = False
    """Initialise a head of another size anew instead of refusing the model."""
    allow_download: bool = True
    """Fetch a Hub id that is not on disk. Local paths and the embedded model never touch the network."""
    freeze: tuple[str, ...] = ()
    """Parts that are not trained: embeddings, encoder (all but the head), layers.3 or layers.0-3."""
    pooling: Literal["pooler", "first", "mean"] | None = None
    """What the head reads: the model's own pooler of the first token, the first token, or the mean. Default: by the recipe."""
    head_start: AutoOnOff = "auto"
    """Start the last layer from a linear model of what it reads instead of random values. Default: by the recipe."""
    pair_start: FromZero | None = None
    """Steps that first teach a model of pairs what its encoder says of each text read alone. 0: none. Default: by the recipe."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""

    # Training
    recipe: Literal["auto", "hf", "best"] = "auto"
    """Options that are not given: auto, from model and data; hf, as transformers; best, the best model of a time_budget."""
    time_budget: str | None = None
    """Time that `--recipe best` or `tunesmith search` may take, such as 20m or 2h. Default of a search: no limit."""
    num_train_epochs: Annotated[float, Range(above=0, at_most=1_000_000)] | None = None
    """Passes over the training rows; may be a fraction. Default: by the recipe (hf: 3)."""
    max_steps: int = -1
    """Train this many optimizer steps, whatever `num_train_epochs` says. -1: by epochs."""
    per_device_train_batch_size: FromOne | None = None
    """Rows in one forward and backward pass on one device. Default: by the recipe (hf: 8)."""
    per_device_eval_batch_size: FromOne = 8
    """Rows in one forward pass on one device when evaluating."""
    gradient_accumulation_steps: Annotated[int, Range(at_least=1, at_most=1_000_000_000)] = 1
    """Batches summed before one optimizer step."""
    learning_rate: Positive | None = None
    """Peak learning rate, reached after warmup. Default: by the recipe (hf: 5e-05)."""
    layerwise_lr_decay: Positive | None = None
    """Learning rate of each layer relative to the layer above it. Default: by the recipe (hf: 1, the same for all)."""
    head_lr_scale: Positive | None = None
    """Learning rate of the head relative to the top layer. Default: by the recipe (hf: 1)."""
    lr_scheduler_type: Annotated[str, SCHEDULE_OPTIONS] = "linear"
    """Shape of the learning rate over the run."""
    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra numbers of the schedule, such as num_cycles, power, min_lr."""
    warmup_steps: Annotated[int | float, Range(at_least=0, whole_from_one=True)] | None = None
    """Steps during which the learning rate rises from 0; below 1 a share of all steps. Default: by the recipe (hf: 0)."""
    optim: Annotated[str, OPTIMIZERS] = "adamw_torch_fused"
    """Optimizer. Fused where torch has a fused kernel for the device."""
    weight_decay: NotNegative | None = None
    """AdamW weight decay, on matrices only (not on biases and normalisation). Default: by the recipe (hf: 0)."""
    adam_beta1: Share = 0.9
    """AdamW beta1."""
    adam_beta2: Share = 0.999
    """AdamW beta2."""
    adam_epsilon: Positive = 1e-8
    """AdamW epsilon."""
    max_grad_norm: NotNegative = 1.0
    """Clip the gradient to this norm. 0: no clipping."""
    label_smoothing_factor: Share = 0.0
    """Share of the target spread evenly over all labels."""
    adversarial: NotNegative = 0.0
    """Adversarial training: word embeddings moved by this share of their norm must not change the outputs. 0: off."""
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    """Weight of each label in the loss: balanced, or one number for each label in id order."""
    move_thresholds: bool = False
    """Fit decision thresholds to the validation rows, for F1. Kept if the gain is larger than its standard error."""
    nan_action: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop the run, or skip that update and continue. It is always recorded."""
    seed: Seed = 42
    """Seed of everything random: head, dropout, row order, split."""
    data_seed: Seed | None = None
    """Seed of the row order and the split alone. Default: `seed`."""
    full_determinism: bool = False
    """Allow only deterministic kernels, so that a repeated run is equal bit for bit; may be slower."""

    # Evaluation and stopping
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """When to evaluate. Default: epoch when there is an evaluation set, else no."""
    eval_steps: Steps | None = None
    """With eval_strategy steps: every this many steps; below 1 a share of all steps. Default: `logging_steps`."""
    eval_delay: NotNegative = 0
    """Do not evaluate before this many epochs (or steps, with eval_strategy steps)."""
    eval_on_start: bool = False
    """Evaluate once before the first step."""
    train_sample_size: FromZero = 256
    """Training rows evaluated beside the validation rows, so that both curves mean the same. 0: none."""
    metric_name: tuple[str, ...] | None = None
    """Metrics to report. Default: by task (GLUE tasks: the official ones)."""
    metric_for_best_model: str | None = None
    """Metric that says which checkpoint is best. Default: the first metric of the task."""
    greater_is_better: bool | None = None
    """Direction of `metric_for_best_model`. Default: known for each metric."""
    load_best_model_at_end: bool | None = None
    """Export the best model instead of the last. Default: yes when there is an evaluation set."""
    early_stopping_patience: FromOne | None = None
    """Stop after this many evaluations in a row without improvement. Default: never."""
    early_stopping_threshold: NotNegative = 0.0
    """Smallest change that counts as an improvement."""

    # Precision and speed
    bf16: bool | None = None
    """Compute in bfloat16 where it is safe; weights stay float32. Default: yes on a GPU that has it, no on a CPU."""
    fp16: bool = False
    """Compute in float16 with loss scaling where it is safe; weights stay float32. Needs a GPU."""
    tf32: bool | None = None
    """Allow TF32 matrix products on NVIDIA GPUs. Default: as torch is set."""
    use_cpu: bool = False
    """Train on the CPU although a GPU is there."""
    padding_free: AutoOnOff = "auto"
    """Compute no padding tokens at all; the result is the same."""
    restrict_vocabulary: AutoOnOff = "auto"
    """Keep only the embedding rows that occur in the data while training; the result is the same."""
    cls_only_last_layer: AutoOnOff = "auto"
    """Compute the last layer for the first token alone where the head reads nothing else; the result is the same."""
    fused_layers: AutoOnOff = "auto"
    """Compute layers in fewer calls, on a GPU in bf16 or fp16, on a CPU in float32; the result is the same."""
    cuda_graphs: AutoOnOff = "auto"
    """On one GPU: capture whole steps as CUDA graphs, one for each size of batch; the result is the same."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    torch_compile_backend: str | None = None
    """Backend of torch.compile. Default: inductor."""
    torch_compile_mode: str | None = None
    """Mode of torch.compile, such as reduce-overhead. Default: torch's own."""
    auto_find_batch_size: bool = True
    """When memory runs out, split the batch and accumulate: the same maths in smaller pieces."""

    # Many devices
    ddp_timeout: Annotated[int, Range(at_least=1, at_most=10_000_000)] = 1800
    """Seconds that a rank waits for the others in a collective operation before it fails."""

    # Output
    output_dir: str | None = None
    """Run folder. Default: runs/<run_name>."""
    run_name: str | None = None
    """Name of the run. Default: made from the data and the model."""
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """When to write a checkpoint. Default: with each evaluation, or once an epoch without an evaluation set."""
    save_steps: Steps = 500
    """With save_strategy steps: every this many steps; below 1 a share of all steps."""
    save_total_limit: FromOne | None = 1
    """Newest checkpoints kept, beside the best one. none: keep all."""
    save_only_model: bool = False
    """Leave optimizer state out of checkpoints: smaller, but the run cannot be resumed from them."""
    resume_from_checkpoint: bool | str | None = None
    """Resume from the newest intact checkpoint of the run folder (true) or from this checkpoint folder."""
    weights_only: bool = False
    """With resume_from_checkpoint: take only the weights; optimizer, schedule and data start from the beginning."""
    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to show the training loss. The journal holds every step in any case."""
    logging_steps: Steps | None = None
    """With logging_strategy steps: every this many steps; below 1 a share. Default: about 20 times an epoch."""
    logging_first_step: bool = False
    """Show the first step too."""
    disable_tqdm: bool | None = None
    """Plain lines instead of progress bars. Default: bars on a terminal."""
    report_to: tuple[str, ...] = ("none",)
    """Trackers beside the journal: tensorboard, wandb, trackio, mlflow or none."""
    project: str = "tunesmith"
    """Project name given to trackers."""
