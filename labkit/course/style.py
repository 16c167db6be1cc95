"""One look for all figures: Okabe-Ito colours, a marker and a dash pattern for each line, alt text, a text twin."""

from __future__ import annotations

import io

import matplotlib.pyplot as plt
from cycler import cycler
from IPython.display import display
from matplotlib.figure import Figure

#: Okabe and Ito's colour-blind-safe palette (2008), without the yellow, which is too weak on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def apply_style() -> None:
    """Set matplotlib's defaults. White background, so that figures can be read on a dark page."""
    plt.rcParams.update(
        {
            "figure.figsize": (7.2, 4.2),
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=COLORS) + cycler(marker=MARKERS) + cycler(linestyle=DASHES),
            "font.size": 11,
            "legend.frameon": False,
            "lines.markersize": 5,
        }
    )


def png(fig: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG, the same bytes for the same figure and matplotlib version."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def show(fig: Figure, alt: str) -> None:
    """Display a figure with its alt text. Alt text says what a reader should see; it is also what the tests compare.

    Raises ValueError if an axis has no label or the alt text says nothing.
    """
    if len(alt) < 20:
        raise ValueError(f"a figure's alt text must say what it shows, got {alt!r}")
    for axes in fig.axes:
        if axes.get_label() != "<colorbar>" and axes.axison and not (axes.get_xlabel() and axes.get_ylabel()):
            raise ValueError(f"the axes {axes.get_title()!r} lack a label on x or y")
    display({"image/png": png(fig), "text/plain": f"Figure: {alt}"}, metadata={"image/png": {"alt": alt}}, raw=True)
    plt.close(fig)
