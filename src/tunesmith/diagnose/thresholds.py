"""Every number that a verdict compares with, in one place.

Losses are shares of the loss of the best constant on the same rows, so that the numbers hold for 2 classes, for 50 and for a
regression. They were chosen on runs of the tasks of bench/diagnose_tasks.py and bench/diagnose_outside.py that are not kept for
a last look; docs/how_to/measure_the_diagnosis.md has the error rates.
"""

from __future__ import annotations

MIN_EVALUATIONS = 3
"""Of curves without rows: two points are a line, and every line "rises" or "falls"."""
MIN_ROWS = 20
"""Below this many validation rows one standard error of an accuracy is more than 10 points."""

ENOUGH_ROWS = 150
"""So many validation rows are enough to tell half of what was learnt from nothing: two errors of an accuracy are 8 points."""

ABOVE_CONSTANT = 2.0
"""Standard errors of the paired difference by which the score must be above the best constant: a run at chance passes with
a probability of 2.3%, whatever the number of evaluations, because the last one alone is asked."""
ERROR_RATE = 0.01
"""Of a rise, over all evaluations of a run: the z that is asked for grows with their number."""

SIGNAL = 0.75
"""Of the z that is significant at 1%, for something to be better than the constant at all. Runs with shuffled labels had up to
0.52, one with 40% wrong labels 0.87."""
ROUGH_GAIN = 0.03
"""By what share a loss is below the constant's, where rows were not kept, to count as a signal."""
LOSS_SPREAD = 1.0
"""Standard deviation of one row's loss, as a multiple of the mean loss, where rows were not kept."""
PAIRED = 0.7
"""Without rows: two evaluations of the same rows differ with about 0.7 of the error of unpaired ones."""

LOW_RATE, USUAL_RATE, HIGH_RATE = 5e-6, 5e-5, 5e-4
"""Peak learning rates for fine-tuning all layers with AdamW at a batch of 16; at batch b times the square root of 16 / b."""
USUAL_HEAD_RATE = 1e-3
"""For a head on a frozen encoder."""
LITTLE_WORK = 8e-4
"""The sum of the learning rates of all steps. Runs that had only begun had 7e-5 to 6e-4, those that learnt 2e-3 and more."""
FEW_ROWS = 300
"""With fewer training rows memorising is what any model does: overfitting, not a problem of the labels."""
ENOUGH_WORK = 8e-3
"""The sum of the learning rates that a longer run is advised to reach: ten times that of runs that had only begun."""
MOST_TIMES = 10
"""A run is not advised to train longer than this many times at once."""
USUAL_BATCH = 16
"""The effective batch that rates are compared at."""

DRIFT, LARGE_RISE = 0.2, 0.4
"""Rise of the validation loss since its lowest value, as a share of that: from the first on the calibration drifts, from the
second on it is overfitting even while the score holds. Good runs of three epochs rose by up to 0.1."""
NOTHING_LEARNT = 0.93
"""A loss at or above this share of the constant's."""
FAR_ABOVE = 1.5
"""A training loss at or above this share of the constant's: not even the mean or the class shares were learnt."""
SAME_ANSWERS = 0.01
"""Spread of the answers between rows of one label: below it every row gets the same answer. Collapsed runs had 0.000."""
SURE_AND_WRONG, SURE_OF_TWO = 0.74, 0.72
"""How often the quarter of validation rows that the model is surest of is right; of two classes. With 40% wrong labels it was
0.44 to 0.64, with 20% 0.61 to 0.79, without any 0.86 and more, with two classes or several labels a row 0.77 and more."""
PLATEAU, PLATEAU_OF_TWO = 0.5, 0.85
"""Wrong rows among the surest ones, beside all rows: 0.5 to 0.95 with wrong labels, 0 to 0.35 without any, 0.53 with several
labels a row. Of two classes a hard task looks like labels that are wrong, up to 0.8."""
TRAIN_ABOVE = 2.5
"""Standard errors by which training rows cost more than validation rows: their labels are worse. In good runs they cost less."""
RANDOM_SHARE, RANDOM_RATIO = 0.3, 9.0
"""Labels of a regression without a meaning, and twice the log likelihood ratio: 0.6 with 13 to 34 at 40%, 0 to 0.26 in good runs
but one task whose texts repeat under other labels."""
LATE_SIZE = 0.1
"""A fall in the second half of the training of less than this share of the constant's loss promises little."""
IGNORED_SHARE = 0.1
"""Validation rows of classes that are never predicted. Good runs with rare classes had up to 0.06."""
IGNORED_CLASS = 0.05
"""Validation rows of the largest such class: of 50 classes with few rows each some are never predicted in a good run."""
MISMATCH = 0.09
"""By how much the validation loss exceeds that of training rows that were not yet trained on, in shares of the constant's."""
STEP_NOISE = 0.5
"""Spread of single steps around the smoothed training loss, as a share of chance, from which on the batch is too small."""
LEAST_CHANGE = 0.05
"""A rise or a swing of less than this share of the constant's loss is none, however large a share of a small loss it is."""
SWING = 0.2
"""A validation loss that rose by this share and came back."""
SWING_EVERY = 8
"""Evaluations for each swing that is asked for: the more looks, the more of them are at the wild steps of the beginning."""
CLOSE = 0.15
"""A verdict with at least this probability is named beside the first."""
