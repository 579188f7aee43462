"""What a run is trained with: a probe of the frozen encoder, floors to compare with, and the decisions made from them."""
