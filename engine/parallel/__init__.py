"""One model over several processes: shares of its heads (tensor parallel), stages of its layers
(pipeline parallel), or both. One process a rank; rank 0 is the engine's own."""
