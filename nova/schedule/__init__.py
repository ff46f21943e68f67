"""Level 3: the Analytic Configurator. Pure functions of shapes and target; imports neither MLIR nor torch."""
