"""Two small files of published results that tests share."""

SMALL = """
title = "Digits, rounds until half are right"
sources = { paper = "nobody", other = "nobody else" }
[measure]
kind = "rounds_to"
metric = "accuracy"
target = 0.5
[quick]
rows = ["fast"]
rounds = 3
[experiment]
rounds = 9
seeds = [1, 2]
[experiment.data]
source = "digits"
partition = { name = "iid", clients = 3 }
server = 0.2
[experiment.train]
batch_size = 16
[experiment.evaluate]
splits = []
target = { accuracy = 0.5 }
stop = "target"
[experiment.algorithm]
fedavg = {}
[experiment.run]
backend = "serial"
[[row]]
name = "fast"
published = { paper = 4, other = 2 }
set = { "train.lr" = 0.3 }
[[row]]
name = "slow"
published = { paper = 7 }
set = { "train.lr" = 0.00001, "rounds" = 2 }
"""


SEVERAL = """
title = "Digits, clients before and after training"
sources = { paper = "nobody" }
[[measure]]
name = "lowest before"
kind = "last"
of = "pre_fit"
clients = "lowest"
percent = true
[[measure]]
name = "spread after, last 2"
kind = "last"
of = "post_fit"
clients = "std"
rounds = 2
[[measure]]
name = "peak round"
kind = "peak_round"
of = "post_fit"
[[measure]]
name = "least"
kind = "trough"
of = "post_fit"
clients = "highest"
[[measure]]
name = "crossing"
kind = "crossing"
of = "pre_fit"
target = 0.5
[[measure]]
name = "everybody's tests"
kind = "last"
of = "universal"
[[measure]]
name = "never measured"
kind = "last"
of = "server"
split = "validation"
[quick]
rounds = 2
set = { seeds = [1] }
[experiment]
rounds = 3
seeds = [1, 2]
[experiment.data]
source = "digits"
partition = { name = "affinity", clients = 3, probability = 0.6 }
[experiment.train]
lr = 0.2
[experiment.evaluate]
universal = true
[experiment.algorithm]
local = {}
central = { name = "fedavg" }
pooled = {}
[experiment.run]
backend = "serial"
[[row]]
name = "no sharing"
run = "all"
label = "local"
published = { paper = { "lowest before" = 20.0, "crossing" = "-" } }
[[row]]
name = "averaging"
run = "all"
label = "central"
[[row]]
name = "one place"
run = "all"
label = "pooled"
"""
