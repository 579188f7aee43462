"""The numbers that signs, sentences and advice compare with; what a verdict rests on is fitted (`weighing.py`).

Losses are shares of the loss of the best constant on the same rows, so that the numbers hold for 2 classes, for 50 and for a
regression.
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

SIGNAL = 1.6
"""Times the z that is significant at 1% over all comparisons: beyond it something was better than the constant."""
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
ENOUGH_WORK = 8e-3
"""The sum of the learning rates that a longer run is advised to reach: ten times that of runs that had only begun."""
MOST_TIMES = 10
"""A run is not advised to train longer than this many times at once."""
USUAL_BATCH = 16
"""The effective batch that rates are compared at."""

NOTABLE_RISE, LARGE_RISE = 0.2, 0.4
"""By what share a validation loss is above the lowest one: from the first on it is mentioned, from the second on it is called
overfitting, and kept weights with such a loss are no longer a note."""
FAR_RISE = 0.7
"""From here on a rise comes first, also of a run that keeps its best weights: then as a note."""
LATE_FALL = 0.3
"""Share of the gain that came in the second half of a run that is not over: the next steps bring more."""
SURE_AND_WRONG = 0.74
"""How often the quarter of validation rows that the model is surest of is right. With 40% wrong labels it was 0.44 to 0.64."""
TRAIN_ABOVE = 2.5
"""Standard errors by which training rows cost more than validation rows: their labels are worse. In good runs they cost less."""
RANDOM_SHARE = 0.3
"""Labels of a regression without a meaning: 0.6 at 40% wrong labels."""
LEAST_CHANGE = 0.05
"""A rise or a swing of less than this share of the constant's loss is none, however large a share of a small loss it is."""
SWING = 0.2
"""A validation loss that rose by this share and came back."""
CLOSE = 0.15
"""A verdict with at least this probability is named beside the first."""
SURE = 0.6
"""A verdict with at least this probability is given even where the validation rows are few."""
