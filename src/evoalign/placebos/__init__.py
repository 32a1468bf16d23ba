# SPDX-License-Identifier: Apache-2.0
"""Placebos: how much of a run's gain is signal, and how much is drift that any coefficients bring.

estimates        drift and signal from evaluations, and the expected distance of drift
file             results/placebo.json
counterfactual   updates with other coefficients, applied to an engine; the placebos at the end of training
run              `evoalign.placebo` and `evoalign replay --counterfactual` of a finished run
"""
