"""The file tier under a store's frames: pages on disk, and what moves between both."""
