package quotacontroller

import (
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// orphan is an aggregate beside which no record of any member stands. It counts for its author. One beside a record is bounded
// by the quota of the record's member, not by that of its author.
type orphan struct {
	aggregate *object
	since     time.Time // first seen without a record
}

// count counts a change of a record or a slice. was and is have the same owner unless an administrator changed the label.
func (c *Controller) count(was, is *object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if was != nil {
		c.add(was.owner, amounts{}.Minus(was.uses()))
	}
	if is != nil {
		c.add(is.owner, is.uses())
	}
	c.wake.Notify()
}

// add adds to the amounts of a member. c.mu is held.
func (c *Controller) add(id clusterset.ClusterID, uses amounts) {
	sum := c.stored[id].Plus(uses)
	sum.PortsPerService = 0
	if sum == (amounts{}) {
		delete(c.stored, id)
		return
	}
	c.stored[id] = sum
}

// countOrphan finds out whether the aggregate of a Service has a record beside it. The callers' changes are readable already,
// so the last of several concurrent calls sees all of them.
func (c *Controller) countOrphan(name clusterset.ServiceName) {
	if name.Name == "" || !c.counted.Load() && (c.records.Err() != nil || c.aggregates.Err() != nil) {
		return // until both are complete, everything looks like an orphan; countOrphans follows
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.recount(name)
}

// recount is countOrphan. c.mu is held.
func (c *Controller) recount(name clusterset.ServiceName) {
	was, known := c.orphans[name]
	var is *object
	if len(c.records.Indexed(name)) == 0 {
		for _, a := range c.aggregates.Indexed(name) {
			is = a
		}
	}
	if known && was.aggregate == is {
		return
	}
	if known {
		c.add(was.aggregate.owner, amounts{Aggregates: -1})
		delete(c.orphans, name)
	}
	if is != nil {
		o := orphan{aggregate: is, since: time.Now()}
		if known && was.aggregate.uid == is.uid {
			o.since = was.since
		}
		c.add(is.owner, amounts{Aggregates: 1})
		c.orphans[name] = o
	}
	c.wake.Notify()
}

// countOrphans recounts all aggregates after the caches became complete.
func (c *Controller) countOrphans() {
	for _, a := range c.aggregates.All() {
		if a.service.Name != "" {
			c.mu.Lock()
			c.recount(a.service)
			c.mu.Unlock()
		}
	}
}

// storedBy returns what a member stores.
func (c *Controller) storedBy(id clusterset.ClusterID) amounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stored[id]
}

// orphansBefore returns the aggregates without a record since before t.
func (c *Controller) orphansBefore(t time.Time) []*object {
	return c.selectOrphans(func(o orphan) bool { return o.since.Before(t) })
}

// orphansOf returns the aggregates without a record that a member created.
func (c *Controller) orphansOf(id clusterset.ClusterID) []*object {
	return c.selectOrphans(func(o orphan) bool { return o.aggregate.owner == id })
}

func (c *Controller) selectOrphans(selected func(orphan) bool) []*object {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*object
	for _, o := range c.orphans {
		if selected(o) {
			all = append(all, o.aggregate)
		}
	}
	return all
}
