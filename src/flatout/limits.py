"""The largest numbers that a configuration, an option of the command line or a model's own file may give.

They are far above any use, and small enough that no sum, chart, clock or allocation breaks before a better message.
"""

# A decoder.
LAYERS = 2**13
HIDDEN = 2**18
HEADS = 2**14
HEAD_DIM = 2**13
INTERMEDIATE = 2**21
VOCAB = 2**24
POSITIONS = 2**30
RANK = 2**14  # of adapters

# Work.
STEPS = 10**9
EPOCHS = 10**6
TOKENS = 10**14
BATCH_TOKENS = 2**31
SEQUENCES = 2**20  # in a batch, or sampled at the same time
ROWS = 10**9  # of a data set
QUESTIONS = 10**6  # of a task
SAMPLES = 2**16  # answers to one question
ANSWER_TOKENS = 2**24
PHASES = 10**6
ROUNDS = 1000
REPEATS = 1000

# A machine.
PROCESSES = 256
THREADS = 1024
RANKS = 2**16  # GPUs, machines and ranks
AHEAD = 1024  # batches or phases that are held ready

SECONDS = 10**8  # about three years
PORT = 65535
SEED = 2**48
REAL = 1e30  # any number without a limit of its own
