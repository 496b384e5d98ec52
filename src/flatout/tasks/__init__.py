"""Where prompts come from and what completions are worth; torch-free, and graded in processes that can be killed."""

from flatout.tasks.base import Message, Messages, Task, Texts
from flatout.tasks.grader import Graded, Grader
from flatout.tasks.specs import open_task

__all__ = ["Graded", "Grader", "Message", "Messages", "Task", "Texts", "open_task"]
