"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_pipeline.schedules import SCHEDULE_NAMES

NAMES_HELP = f"{', '.join(SCHEDULE_NAMES)}; or a CSV file, which brings its own counts."

Ranks = Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks that hold one copy of the model.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches in one step.")]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        "-v",
        min=1,
        show_default="2 for schedules made for several, else 1",
        help="Virtual stages on each rank, where a schedule takes several.",
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time of a micro-batch's forward on a rank. Each of v virtual stages takes a v-th of it, which keeps "
        "schedules comparable. Or a list such as 1,1,2: one for each of RANKS equal parts of the model.",
    ),
]
InputGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the inputs.")]
WeightGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the weights.")]
Transfer = Annotated[float, typer.Option(min=0, metavar="TIME", help="Time until a value is on another rank.")]
