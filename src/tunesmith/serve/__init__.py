"""The live board and the prediction service over HTTP."""
