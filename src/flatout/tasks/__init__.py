"""Tasks: prompts and rewards for completions, without torch, graded in processes that can be killed."""

from flatout.tasks.base import Levelled, Measured, Message, Messages, Task, Texts, Worked
from flatout.tasks.grader import Graded, Grader
from flatout.tasks.specs import open_task, with_prompt

__all__ = [
    "Graded",
    "Grader",
    "Levelled",
    "Measured",
    "Message",
    "Messages",
    "Task",
    "Texts",
    "Worked",
    "open_task",
    "with_prompt",
]
