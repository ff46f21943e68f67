"""Imports every file of emitters, so that the registry `emit.EMITTERS` is full."""

from nova.dialect import (  # noqa: F401
    emit_contraction,
    emit_creation,
    emit_elementwise,
    emit_indexing,
    emit_losses,
    emit_normalisation,
    emit_pooling,
    emit_reductions,
    emit_training,
    emit_views,
)
