"""Policies: which precision things have, and who decides."""

from jamp.policy._policy import Policy as Policy
from jamp.policy._policy import get_policy as get_policy
from jamp.policy._rule import Rule as Rule
