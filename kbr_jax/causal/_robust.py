import equinox as eqx
import jax.numpy as jnp
from ._intervene import AbstractCausalModel
from ._outcome import OutcomeBridge
from ._treatment import TreatmentBridge, refuse_adjust
from .._numerics import matmul
class DoublyRobust(AbstractCausalModel):
    outcome: OutcomeBridge
    treatment: TreatmentBridge
    kernel_y: eqx.Module
    y: eqx.Module
    @property
    def doses(self): return self.outcome.doses
    def weights(self, doses, adjust):
        refuse_adjust(adjust)
        near = self.treatment.local_weights(doses)
        mass = jnp.sum(near, axis=1, keepdims=True)
        plain = self.outcome.weights(doses, None)
        at = self.outcome.at(doses, matmul(near, self.outcome.proxies.matrix))
        level = self.outcome.at(doses, jnp.zeros((near.shape[0], self.outcome.proxies.matrix.shape[1])))
        return plain + near - (at - level) - mass*level
