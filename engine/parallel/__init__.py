"""Parallel execution of one model by several processes, one per rank: tensor parallel (shares of
the heads), pipeline parallel (stages of the layers), or both. Rank 0 is the engine's own
process."""
