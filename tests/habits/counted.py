"""A module whose global others count in (`places_of_state`)."""

COUNT = 0
