"""Every number the rules compare with, in one place, with its reason.

"Chance" below is the loss of always answering with the class shares (their entropy; ln k when the shares are unknown).
Losses are compared relative to chance or to each other, so that the numbers hold for 2 classes and for 50.
They were checked and partly chosen on the even seeds of bench/diagnose_runs.py (docs/how_to/measure_the_diagnosis.md); a value
without a measurement beside it was right there as it stood.
"""

from __future__ import annotations

MIN_EVALUATIONS = 3
"""Two points are a line, and every line "rises" or "falls"; a three-epoch run must get a verdict."""
MIN_ROWS = 20
"""Below this many validation rows one standard error of an accuracy is more than 10 points."""

LOSS_SPREAD = 1.0
"""Standard deviation of one row's loss, as a multiple of the mean loss. Measured on four runs of paraphrase-MiniLM-L3:
0.64 (TREC) and 0.66 (MRPC) after three epochs, 1.39 after twelve, 1.86 at 30 times the rate."""
SIGMAS = 2.0
"""A difference counts when it is larger than this many standard errors."""
PAIRED = 0.7
"""Two evaluations use the same rows: their difference has about 0.7 of the error of unpaired ones."""

RISE_WITH_WORSE_SCORE = 0.10
"""Overfitting, first sign: validation loss rose 10% and the score fell too."""
RISE_ALONE = 0.30
"""Overfitting, second sign: validation loss rose 30% while the score held. Less is usual in a good 3-epoch run."""
TRAIN_FELL = 0.10
"""Training loss must have fallen this much meanwhile, or the rise has another cause."""
MEMORISED = 0.25
"""Training loss below this share of the validation loss: the rows are known by heart."""
SCORE_GAP = 0.20
"""Training score this far above the validation score, with the rows known by heart, is overfitting without a rise."""
BEGUN_TO_MEMORISE = 0.9
"""Training loss below this share of chance while validation never came below chance: what is learnt is of no use elsewhere."""
FEW_ROWS = 250
"""With fewer training rows memorising is what any model does: overfitting, not a problem of the labels."""

NEAR_CHANCE = 0.93
"""Training loss at or above this share of chance: nothing was learnt."""
BARELY_BELOW_CHANCE = 0.85
"""Training loss at or above this share of chance: too little was learnt."""
PARTLY_LEARNT = 0.45
"""With a reason at hand (a tiny rate, frozen layers), a training loss above this share of chance is underfitting."""
SMALL_GAP = 0.15
"""Training and validation loss closer than this share of chance: the model treats both alike."""
ENOUGH_STEPS = 150
"""After this many steps at a usual rate, an encoder that could learn has begun to."""
MOST_TIMES = 10
"""A run is not advised to train longer than this many times at once."""

LOW_RATE, USUAL_RATE, HIGH_RATE = 5e-6, 3e-5, 2e-4
"""Peak learning rates for fine-tuning all layers with AdamW: at or below the first little moves, the middle is what
papers use for BERT-like encoders, at or above the last base-size encoders tend to collapse (the 3-layer MiniLM did not,
at 1.5e-3: the rule therefore also asks for a training loss at chance)."""
USUAL_HEAD_RATE = 1e-3
"""For a head on a frozen encoder."""

STILL_FALLING = 0.08
"""Validation loss fell by this share in the last interval: the curve has not flattened. A linear schedule flattens it: in good
runs of four epochs on TREC the last epoch still gave 1% to 7%."""
GOES_ON = 0.04
"""Training loss fell by this share over the last two intervals: learning goes on."""
DONE = 0.45
"""Validation loss below this share of chance: most was learnt, and that it still falls is no fault. Good runs on TREC ended at
0.25 to 0.4 of chance, some of them still falling by 14% an epoch; runs on a third of the rows at 0.65 and more.
Raised from 0.15 after a first look at odd seeds (1, 3), which no longer count as held out."""

BLOWN_UP = 1.3
"""Training loss at the end, as a multiple of chance: worse than knowing nothing."""
COLLAPSED_FROM = 0.8
"""Training loss had been below this share of chance and came back to it: what was learnt is gone."""

SWING = 0.20
"""A validation loss that rose by this share and came back is one swing too many; two smaller ones are, too."""
SMALL_SWING = 0.08
"""Smaller swings are not counted."""
STEP_NOISE = 0.5
"""Spread of single steps around the smoothed training loss, as a share of chance. Measured: 0.03 to 0.07 at batch 16, 0.11 at
30 times the rate; at batch 1, 0.27 on TREC, which did not hurt the test score, and 0.81 on the sample, which did."""
USUAL_BATCH = 16
"""The effective batch to reach when the steps are too noisy."""
