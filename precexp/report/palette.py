"""The colours of arms, memory's categories and kinds of parameters: the same wherever drawn."""

from collections.abc import Sequence

# Okabe and Ito's colour-blind-safe palette, without the yellow that paper swallows.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
# Held from step to step in dark tones, what a step makes in light ones.
CATEGORY_COLOURS = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer_state": "#009E73",
    "activations": "#56B4E9",
    "autocast_copies": "#CC79A7",
    "loss": "#E69F00",
    "inputs": "#999999",
    "temporaries": "#BBBBBB",
    "buffers": "#666666",
    "unattributed": "#DDDDDD",
}

# Of the lines of a numerics panel.
KIND_COLOURS = {
    "embedding": "#0072B2",
    "attention": "#E69F00",
    "mlp": "#009E73",
    "bias": "#CC79A7",
    "norm": "#D55E00",
    "all": "#59626C",  # seen on light and dark pages
}


def colour_of(label: str, labels: Sequence[str]) -> str:
    """An arm's colour: by its place among the labels of all arms, `Report.labels`."""
    return COLOURS[labels.index(label) % len(COLOURS)]
