"""A page that shows a run while it happens: `fedloom watch`, and the operator's page of `fedloom serve`."""
