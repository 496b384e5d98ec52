"""One readable loop per kind of training. They may resemble each other; the step exists once, in the engine."""
