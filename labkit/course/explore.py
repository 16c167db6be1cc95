"""A widget with a static twin: sliders where a kernel runs, a picture and its words everywhere else."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt

from labkit.course.style import png
from labkit.errors import LabError


class Explorer:
    """Shows ``draw(**values) -> (figure, words)`` for values that can be changed.

    ``controls`` maps each of draw's parameters to the list of values it may take; the static twin shows those in
    ``start``, and the first of the list for parameters not in it. Display it as a cell's last expression: its MIME
    bundle holds the widget, a PNG and the words. Stored notebooks keep the PNG and the words; the widget is made anew
    where a kernel runs.
    """

    def __init__(
        self, draw: Callable[..., tuple[Any, str]], controls: dict[str, list], start: dict[str, Any] | None = None
    ):
        self.draw, self.controls = draw, controls
        self.values = {name: (start or {}).get(name, options[0]) for name, options in controls.items()}
        for name, value in self.values.items():
            if value not in controls[name]:
                raise LabError(f"{name}={value!r} is not among the values offered: {controls[name]}")

    def render(self, caption: bool = False) -> tuple[bytes, str]:
        """The picture and its words for the current values; with ``caption``, the words stand in the picture too."""
        fig, words = self.draw(**self.values)
        try:
            if caption:
                fig.suptitle(textwrap.fill(words, 90), fontsize=10, x=0.01, ha="left")
            return png(fig), words
        finally:
            plt.close(fig)

    def widget(self):
        """The ipywidgets box: a slider for each control above the picture and its words."""
        import ipywidgets as w

        image = w.Image(format="png", layout=w.Layout(max_width="100%", object_fit="contain"))
        words = w.HTML()
        sliders = {
            name: w.SelectionSlider(
                options=[(_label(o), o) for o in options],
                value=self.values[name],
                description=name.replace("_", " "),
                continuous_update=False,
                style={"description_width": "9em"},
                layout=w.Layout(width="min(100%, 34em)"),
            )
            for name, options in self.controls.items()
        }

        def redraw(*_):
            self.values = {name: slider.value for name, slider in sliders.items()}
            image.value, text = self.render()
            words.value = f"<p>{text}</p>"

        for slider in sliders.values():
            slider.observe(redraw, names="value")
        redraw()
        return w.VBox([*sliders.values(), image, words])

    def _repr_mimebundle_(self, include=None, exclude=None):
        picture, words = self.render(caption=True)
        state = ", ".join(f"{name} = {_label(value)}" for name, value in self.values.items())
        view = self.widget()._repr_mimebundle_() if _has_kernel() else {}
        twin = {"image/png": base64.b64encode(picture).decode(), "text/plain": f"Widget ({state}): {words}"}
        return view | twin, {"image/png": {"alt": words}}


def _label(value) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def _has_kernel() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")
