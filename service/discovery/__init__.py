"""Finds the endpoints of the fleet and follows their changes.

Read in this order: `sighting` (what a source sees, and how that becomes distinct endpoints), `follow` (what is done
with it, and without it), then the sources: `names` (DNS), `slices` and `api_server` (Kubernetes).
"""

from service.discovery.follow import Discovery

__all__ = ["Discovery"]
