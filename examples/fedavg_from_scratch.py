"""Federated averaging (McMahan et al. 2017), written by hand on fedloom's public API: the whole idea in one file.

Ten people write digits. Nobody shares pictures; everybody helps to train one model. Run it with
`python examples/fedavg_from_scratch.py`.
"""

from sklearn.datasets import load_digits
from torch import nn

import fedloom as fl
from fedloom.algorithm import Algorithm, Update, expand


class AverageByHand(Algorithm):
    """Clients train the shared model on their own data, and the server takes the mean of their weights.

    An algorithm has two halves. `round` runs on the server. `client` runs where the data is; the server sees only what
    the verb lets through, and `reduce` lets through nothing but weighted means.
    """

    def round(self, state, cohort):
        """Send the model to the clients of this round; their weighted mean is the new model."""
        mean = cohort.reduce(self.client, {"model": state["model"]})
        return {"model": mean["model"]}

    def client(self, task, shared, own, data):
        """Train locally. `data` holds several clients, so every tensor has one row per client."""
        start = expand(shared["model"], len(data))  # each client starts from its own copy of the model
        trained = self.fit(task, start, shared, own, data)
        update = Update({"model": trained.model}, data.examples, trained=trained, positions={"model": "model"})
        return update, trained.own  # what leaves the client, and what it keeps


def people():
    """Handwritten digits, divided among ten people, each of whom mostly writes one digit."""
    x, y = load_digits(return_X_y=True)
    partition = {"name": "affinity", "clients": 10, "probability": 0.7}
    return fl.Federation.from_arrays((x / 16).astype("float32"), y, partition=partition)


def main():
    """Train for twenty rounds with half of the people in each, and print how well each round's model does."""
    task = fl.Task(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), metrics=["accuracy"])
    algorithm = AverageByHand(lr=0.3, epochs=2, batch_size=16)
    for record in fl.fit(people(), task, algorithm, rounds=20, sampling=fl.Sampling(fraction=0.5)):
        before = record.clients["pre_fit"]  # the model as this round's clients received it, on everybody's test data
        right = [splits["test"].values(task)["accuracy"] for splits in before.values()]
        print(f"round {record.round:2}: accuracy {sum(right) / len(right):.3f}, mean over {len(right)} people")


if __name__ == "__main__":
    main()
