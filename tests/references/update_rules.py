"""Update rules of one matrix (inputs x outputs) in NumPy, float64, written from the equations of
their papers.

Each takes the matrix, its gradients by step, and the learning rate, and returns the matrix after
these steps.
"""

import numpy as np


def ademamix(x, grads, rate, warmup, b1=0.9, b2=0.95, b3=0.9999, alpha=5.0, eps=1e-8):
    """Return x after each step of algorithm 1 of Pagliardini et al. 2024, with its schedulers."""

    def half_life(b):
        return np.log(0.5) / np.log(b)

    fast = slow = square = 0.0
    for t, g in enumerate(grads, 1):
        a = min(1.0, t / warmup)
        b3_t = 0.5 ** (1 / ((1 - a) * half_life(b1) + a * half_life(b3)))
        fast = b1 * fast + (1 - b1) * g
        slow = b3_t * slow + (1 - b3_t) * g
        square = b2 * square + (1 - b2) * g**2
        mean = fast / (1 - b1**t) + a * alpha * slow
        x = x - rate * mean / (np.sqrt(square / (1 - b2**t)) + eps)
        yield x


def orthogonalized(g):
    """Return five steps x <- a x + b (x x^T) x + c (x x^T)^2 x from x = g / |g| (Jordan et al.
    2024).
    """
    x = g / (np.linalg.norm(g) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def muon_directions(grads, nesterov):
    """Yield u by momentum.lerp(g, 1 - beta) and g.lerp(momentum, beta), as in Jordan's muon_update."""
    m = 0.0
    for g in grads:
        m = m + (g - m) * 0.05
        yield orthogonalized(g + (m - g) * 0.95 if nesterov else m)


def muon(w, grads, rate, nesterov=True):
    for u in muon_directions(grads, nesterov):
        w = w - rate * max(1, w.shape[1] / w.shape[0]) ** 0.5 * u  # his matrices are transposed
    return w


def muonh(w, grads, rate):
    """Return the matrix after steps on the sphere through w (Wen et al. 2026)."""
    radius = np.linalg.norm(w)
    for u in muon_directions(grads, nesterov=True):
        w = w - rate * radius * u / np.linalg.norm(u)
        w = radius * w / np.linalg.norm(w)
    return w


def normuon(w, grads, rate):
    """Return the matrix after algorithm 1 of Li et al. 2025, whose neurons are rows: columns here."""
    v = np.zeros(w.shape[1])
    for u in muon_directions(grads, nesterov=False):
        v = 0.95 * v + 0.05 * np.square(u).mean(axis=0)
        d = u / (np.sqrt(v) + 1e-8)
        w = w - 0.2 * rate * np.sqrt(w.size) / np.linalg.norm(d) * d
    return w


def soap(w, grads, rate, every=2):
    """Return the matrix after algorithms 3 and 4 of Vyas et al. 2024.

    As in the authors' code, the first gradient gives the eigenvectors only, and Adam corrects its
    bias.
    """
    first, *others = grads
    left, right = 0.05 * first @ first.T, 0.05 * first.T @ first
    q_l, q_r = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(others, 1):
        rotated = q_l.T @ g @ q_r
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * rotated**2
        n = (q_l.T @ m @ q_r / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w = w - rate * q_l @ n @ q_r.T
        left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
        if t % every == 0:
            q_l, q_r = (np.linalg.qr(x @ q)[0] for x, q in ((left, q_l), (right, q_r)))
    return w


def adam(w, grads, rate):
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w - rate * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    return w
