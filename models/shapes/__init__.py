"""The embedded world of coloured shapes: scenes, captions, an exact detector and the trained models' assets."""
