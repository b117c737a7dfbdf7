package client

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/internal/quota"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/mcs"
)

const (
	// judgeInterval is the time from one judgement of quotas to the next.
	judgeInterval = 100 * time.Millisecond
	// fillRetry is the delay after the broker did not answer.
	fillRetry = time.Second
	// gaugeInterval is the time from one update of the metrics to the next.
	gaugeInterval = 5 * time.Second
	// stubFactor: the caches keep the content of a member's waiting objects up to this many times its limits.
	stubFactor = 2
	// completions is how many objects are read from the broker at a time.
	completions = 8
)

var (
	quotaUsed    = quotaGauge("used", "Amount that a member uses of a quota, as far as it is admitted.")
	quotaLimit   = quotaGauge("limit", "Limit of a quota.")
	quotaWaiting = quotaGauge("waiting", "Export records and EndpointSlices of a member that wait because a quota is used up; they are not imported.")
)

func quotaGauge(name, help string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "isthmus_controller_quota_" + name, Help: help}, []string{"cluster", "kind"})
	metrics.Registry.MustRegister(g)
	return g
}

// quotas tracks what each member has on the broker, and which of it is admitted. As long as a member is within its quota,
// a change costs an addition; only beyond it a judgement decides by object, at most every judgeInterval. Safe for
// concurrent use.
type quotas struct {
	self   clusterset.ClusterID // its objects are always cached completely
	wake   signal.Signal        // a member is over its quota and changed
	judged chan struct{}        // closed after the first judgement

	mu      sync.RWMutex
	limits  quota.Amounts
	members map[clusterset.ClusterID]*usage
}

// usage is what one member has on the broker.
type usage struct {
	total  quota.Amounts // of all objects; it ignores the labels of slices
	labels int           // the bytes of the labels that a slice of the member has, at most
	// arrived are the records, and the slices, that were compacted and are not cached yet.
	arrivedRecords, arrivedSlices quota.Amounts

	over    bool           // the member was beyond its quota at the last change or judgement
	verdict *quota.Verdict // nil: all are admitted but those of late
	// late are the new objects of a member that is over its quota, with their Services, until the next judgement.
	late map[any]clusterset.ServiceName
}

func newQuotas(self clusterset.ClusterID) *quotas {
	return &quotas{
		self: self, wake: signal.New(), judged: make(chan struct{}),
		limits: quota.Defaults(), members: map[clusterset.ClusterID]*usage{},
	}
}

// member returns the usage of a member. q.mu is held.
func (q *quotas) member(id clusterset.ClusterID) *usage {
	u := q.members[id]
	if u == nil {
		u = &usage{}
		q.members[id] = u
	}
	return u
}

// exceeded returns the first limit that everything of the member together exceeds, "" without one.
func (u *usage) exceeded(limits quota.Amounts, factor int) quota.Kind {
	all := u.total
	all.PortsPerService = 0 // Judge looks at each record
	all.MetadataBytes += u.labels * all.Slices
	return all.Exceeds(limits, factor)
}

// admits reports whether an object, a clusterset.ServiceName for a record or a string for a slice, is admitted.
func (u *usage) admits(key any) bool {
	switch v := u.verdict; k := key.(type) {
	case clusterset.ServiceName:
		if v != nil {
			_, ok := v.Records[k]
			return ok
		}
	case string:
		if v != nil {
			_, ok := v.Slices[k]
			return ok
		}
	}
	_, late := u.late[key]
	return !late
}

// arrivedWith returns the sum for objects of the kind of key.
func (u *usage) arrivedWith(key any) *quota.Amounts {
	if _, ok := key.(string); ok {
		return &u.arrivedSlices
	}
	return &u.arrivedRecords
}

// arrives counts an object that was just compacted, and reports whether only its stub may be kept: the member is far
// beyond its quota, and the object is not known to be admitted.
func (q *quotas) arrives(id clusterset.ClusterID, key any, uses quota.Amounts) bool {
	if id == q.self {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	u := q.member(id)
	arrived := u.arrivedWith(key)
	*arrived = arrived.Plus(uses)
	arrived.PortsPerService = 0
	if u.verdict != nil && u.exceeded(q.limits, stubFactor) != "" {
		return !u.admits(key)
	}
	return arrived.Exceeds(q.limits, stubFactor) != ""
}

// change counts a change of an object of a Service, before the cache shows it to readers. labels are the bytes of labels that
// a slice of a record has.
func (q *quotas) change(id clusterset.ClusterID, key any, of clusterset.ServiceName, was, is quota.Amounts, labels int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	u := q.member(id)
	*u.arrivedWith(key) = quota.Amounts{}
	u.total = u.total.Minus(was).Plus(is)
	u.labels = max(u.labels, labels)
	if !u.over && u.exceeded(q.limits, 1) == "" && is.PortsPerService <= q.limits.PortsPerService {
		return
	}
	u.over = true
	if was == (quota.Amounts{}) && is != was {
		if u.late == nil {
			u.late = map[any]clusterset.ServiceName{}
		}
		u.late[key] = of
	}
	q.wake.Notify()
}

// setLimits sets the limits, and has all members judged.
func (q *quotas) setLimits(limits quota.Amounts) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if limits == q.limits {
		return
	}
	q.limits = limits
	for _, u := range q.members {
		u.over = true
	}
	q.wake.Notify()
}

// current returns the limits.
func (q *quotas) current() quota.Amounts {
	q.mu.RLock()
	defer q.mu.RUnlock()
	return q.limits
}

// left forgets the decisions about a member; what it still has on the broker stays counted.
func (q *quotas) left(id clusterset.ClusterID) {
	q.mu.Lock()
	if u := q.members[id]; u != nil && u.total == (quota.Amounts{}) {
		delete(q.members, id)
	}
	q.mu.Unlock()
	for _, g := range []*prometheus.GaugeVec{quotaUsed, quotaLimit, quotaWaiting} {
		g.DeletePartialMatch(prometheus.Labels{"cluster": string(id)})
	}
}

// admits reports whether an object of a member is admitted.
func (q *quotas) admits(id clusterset.ClusterID, key any) bool {
	q.mu.RLock()
	defer q.mu.RUnlock()
	u := q.members[id]
	return u == nil || u.admits(key)
}

// due returns the members to judge, and the limits.
func (q *quotas) due() (map[clusterset.ClusterID]*subject, quota.Amounts) {
	q.mu.RLock()
	defer q.mu.RUnlock()
	all := map[clusterset.ClusterID]*subject{}
	for id, u := range q.members {
		if u.over {
			all[id] = &subject{}
		}
	}
	return all, q.limits
}

// settle takes a verdict, and returns the objects whose admission it changes; the verdict is nil if all are admitted.
// stubs reports whether the member is far beyond its quota.
func (q *quotas) settle(id clusterset.ClusterID, s *subject, v quota.Verdict) (changed map[clusterset.ServiceName]bool, stubs bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	u := q.members[id]
	if u == nil {
		return nil, false
	}
	before := *u
	u.labels = 0
	for _, r := range s.recordSizes {
		u.labels = max(u.labels, r.Labels)
	}
	u.late = nil
	u.verdict = &v
	if len(v.Waiting) == 0 && u.exceeded(q.limits, 1) == "" && !s.hasStubs {
		u.over, u.verdict = false, nil
	}
	changed = map[clusterset.ServiceName]bool{}
	for key, name := range before.late {
		if u.admits(key) {
			changed[name] = true
		}
	}
	news := id == q.self && (before.verdict == nil || before.verdict.RecordLimit != v.RecordLimit)
	for _, r := range s.recordSizes {
		_, ok := v.Records[r.Service]
		_, late := before.late[r.Service]
		if ok != before.admits(r.Service) || !ok && (news || late) {
			changed[r.Service] = true
		}
	}
	for _, p := range s.sliceSizes {
		if _, ok := v.Slices[p.Name]; ok != before.admits(p.Name) {
			changed[p.Service] = true
		}
	}
	return changed, u.exceeded(q.limits, stubFactor) != ""
}

// report sets the metrics of members.
func (q *quotas) report(members []clusterset.ClusterID) {
	q.mu.RLock()
	defer q.mu.RUnlock()
	for _, id := range members {
		u := q.members[id]
		if u == nil {
			u = &usage{}
		}
		used, waiting := u.total, map[quota.Kind]int(nil)
		if u.verdict != nil {
			used, waiting = u.verdict.Used, u.verdict.Waiting
		}
		for _, k := range quota.Kinds() {
			quotaUsed.WithLabelValues(string(id), string(k)).Set(float64(used.Get(k)))
			quotaLimit.WithLabelValues(string(id), string(k)).Set(float64(q.limits.Get(k)))
			quotaWaiting.WithLabelValues(string(id), string(k)).Set(float64(waiting[k]))
		}
	}
}

// subject is what one member has on the broker, to be judged.
type subject struct {
	records     []*record
	slices      []*mcs.Packed
	recordSizes []quota.Record
	sliceSizes  []quota.Slice
	hasStubs    bool
}

// size returns what a record uses: nothing if it is nil, a tombstone or invalid.
func (r *record) size() quota.Record {
	if r == nil || r.isWithdrawn() || r.err != nil || r.service.Name == "" {
		return quota.Record{}
	}
	return quota.Record{Service: r.service, Created: r.created, Ports: r.ports, Bytes: r.bytes, Labels: r.labels}
}

// amounts returns what a record uses, and the bytes of labels that a slice of it has.
func (r *record) amounts() (quota.Amounts, int) {
	size := r.size()
	if size.Service.Name == "" {
		return quota.Amounts{}, 0
	}
	return size.Amounts(), size.Labels
}

func amountsOfSlice(p *mcs.Packed) quota.Amounts {
	if p == nil {
		return quota.Amounts{}
	}
	return quota.SliceOf(p).Amounts()
}

// countRecord counts a change of a record for the quota of its member.
func (b *Broker) countRecord(was, is *record) {
	if was != nil && is != nil && (was.owner != is.owner || was.service != is.service) {
		b.countRecord(was, nil)
		was = nil
	}
	before, _ := was.amounts()
	after, labels := is.amounts()
	if r := objectcache.Either(was, is); before != after || labels > 0 {
		b.quotas.change(r.owner, r.service, r.service, before, after, labels)
	}
}

// countSlice counts a change of a slice for the quota of its member.
func (b *Broker) countSlice(was, is *mcs.Packed) {
	if was != nil && is != nil && was.Owner != is.Owner {
		b.countSlice(was, nil)
		was = nil
	}
	p := objectcache.Either(was, is)
	b.quotas.change(p.Owner, p.Name, p.Service, amountsOfSlice(was), amountsOfSlice(is), 0)
}

// arriveRecord compacts a record from the broker.
func (b *Broker) arriveRecord(obj *v1alpha1.ExportRecord) *record {
	r := compactRecord(obj)
	if r.isWithdrawn() {
		return r.asStub() // a tombstone counts for no quota, so it takes little memory
	}
	if uses, _ := r.amounts(); uses != (quota.Amounts{}) && b.quotas.arrives(r.owner, r.service, uses) {
		return r.asStub()
	}
	return r
}

// arriveSlice compacts a slice from the broker.
func (b *Broker) arriveSlice(es *discoveryv1.EndpointSlice) *mcs.Packed {
	p := mcs.Pack(es)
	if b.quotas.arrives(p.Owner, p.Name, amountsOfSlice(p)) {
		return p.Stub()
	}
	return p
}

// asStub returns r without the content of its export.
func (r *record) asStub() *record {
	s := *r
	s.stub, s.omitted = true, nil
	s.export = clusterset.Export{Cluster: r.export.Cluster, Service: r.export.Service, ExportedAt: r.export.ExportedAt, IPs: r.export.IPs}
	return &s
}

// runQuotas judges members that are beyond their quotas until ctx ends.
func (b *Broker) runQuotas(ctx context.Context) error {
	for _, wait := range []func(context.Context) error{b.records.WaitForSync, b.slices.WaitForSync, b.waitForRegistry} {
		if err := wait(ctx); err != nil {
			return nil // ctx ended
		}
	}
	gauges := time.NewTicker(gaugeInterval)
	defer gauges.Stop()
	for judged := false; ; {
		pause, complete := judgeInterval, b.judge(ctx)
		b.quotas.report(b.Members())
		switch {
		case !complete:
			pause = fillRetry
			b.quotas.wake.Notify()
		case !judged:
			judged = true
			close(b.quotas.judged)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if !b.awaitChange(ctx, gauges.C) {
			return nil
		}
	}
}

// awaitChange updates the metrics until a member needs a judgement, and reports false when ctx ends.
func (b *Broker) awaitChange(ctx context.Context, gauges <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-b.quotas.wake.C():
			return true
		case <-gauges:
			b.quotas.report(b.Members())
		}
	}
}

// judge judges each member that is beyond its quota, and reconciles the Services whose admission changes. It reports
// whether all admitted objects are complete.
func (b *Broker) judge(ctx context.Context) bool {
	subjects, limits := b.quotas.due()
	if len(subjects) == 0 {
		return true
	}
	for _, r := range b.records.All() {
		if s := subjects[r.owner]; s != nil && r.size().Service.Name != "" {
			s.records, s.recordSizes = append(s.records, r), append(s.recordSizes, r.size())
			s.hasStubs = s.hasStubs || r.stub
		}
	}
	for _, p := range b.slices.All() {
		if s := subjects[p.Owner]; s != nil {
			s.slices, s.sliceSizes = append(s.slices, p), append(s.sliceSizes, quota.SliceOf(p))
			s.hasStubs = s.hasStubs || p.IsStub()
		}
	}
	complete := true
	for _, id := range slices.Sorted(maps.Keys(subjects)) {
		s := subjects[id]
		verdict := quota.Judge(limits, s.recordSizes, s.sliceSizes)
		changed, stubs := b.quotas.settle(id, s, verdict)
		if stubs && id != b.cfg.Self {
			b.dropContent(s, verdict)
		}
		complete = b.fillAdmitted(ctx, s, verdict) && complete
		b.changes.Send(slices.Collect(maps.Keys(changed))...)
	}
	return complete
}

// dropContent replaces the waiting objects of a member in the caches by stubs.
func (b *Broker) dropContent(s *subject, v quota.Verdict) {
	for _, r := range s.records {
		if _, ok := v.Records[r.service]; !ok && !r.stub {
			b.records.Swap(b.cfg.Namespace, mcs.RecordName(r.owner, r.service), r, r.asStub())
		}
	}
	for _, p := range s.slices {
		if _, ok := v.Slices[p.Name]; !ok && !p.IsStub() {
			b.slices.Swap(b.cfg.Namespace, p.Name, p, p.Stub())
		}
	}
}

// fillAdmitted reads the admitted objects of a member that the caches have as stubs, and reports whether it could read all.
func (b *Broker) fillAdmitted(ctx context.Context, s *subject, v quota.Verdict) bool {
	var group errgroup.Group
	group.SetLimit(completions)
	for _, r := range s.records {
		if _, ok := v.Records[r.service]; ok && r.stub {
			group.Go(func() error { return b.fillRecord(ctx, r) })
		}
	}
	for _, p := range s.slices {
		if _, ok := v.Slices[p.Name]; ok && p.IsStub() {
			group.Go(func() error { return b.fillSlice(ctx, p) })
		}
	}
	if err := group.Wait(); err != nil {
		b.cfg.Log.Warn("objects on the broker that no longer wait for a quota cannot be read yet", "err", err)
		return false
	}
	return true
}

// fillRecord replaces a stub by its record. A record that changed meanwhile arrives by the watch.
func (b *Broker) fillRecord(ctx context.Context, r *record) error {
	obj := &v1alpha1.ExportRecord{}
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: mcs.RecordName(r.owner, r.service)}
	if err := b.client.Get(ctx, key, obj); err != nil {
		return ignoreNotFound(err, key.Name)
	}
	if full := compactRecord(obj); full.uid == r.uid && full.digest == r.digest && b.records.Swap(key.Namespace, key.Name, r, full) {
		b.changes.Send(r.service)
	}
	return nil
}

// fillSlice replaces a stub by its slice. A slice that changed meanwhile arrives by the watch.
func (b *Broker) fillSlice(ctx context.Context, p *mcs.Packed) error {
	obj := &discoveryv1.EndpointSlice{}
	key := types.NamespacedName{Namespace: b.cfg.Namespace, Name: p.Name}
	if err := b.client.Get(ctx, key, obj); err != nil {
		return ignoreNotFound(err, key.Name)
	}
	if full := mcs.Pack(obj); full.Digest == p.Digest && full.Created.Equal(p.Created) && b.slices.Swap(key.Namespace, key.Name, p, full) {
		b.changes.Send(p.Service)
	}
	return nil
}

func ignoreNotFound(err error, name string) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return fmt.Errorf("read %s: %w", name, err)
}

// waitForQuotas waits until the quotas were judged once: an earlier reader would remove imports of admitted objects.
func (b *Broker) waitForQuotas(ctx context.Context) error {
	select {
	case <-b.quotas.judged:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the judgement of quotas: %w", ctx.Err())
	}
}

// Waiting returns the quotas for which this member's export of a Service waits, and for which count of its slices wait;
// nil for none.
func (b *Broker) Waiting(name clusterset.ServiceName) (record, slices *quota.Overrun, count int) {
	r := b.record(b.cfg.Self, name)
	packed := b.ownSlices(name)
	b.quotas.mu.RLock()
	defer b.quotas.mu.RUnlock()
	u := b.quotas.members[b.cfg.Self]
	if u == nil || u.verdict == nil {
		return nil, nil, 0
	}
	overrun := func(k quota.Kind) *quota.Overrun {
		return &quota.Overrun{Kind: k, Used: u.verdict.Used.Get(k), Limit: b.quotas.limits.Get(k)}
	}
	switch size := r.size(); {
	case size.Service.Name == "":
	case size.Ports > b.quotas.limits.PortsPerService:
		return &quota.Overrun{Kind: quota.PortsPerService, Used: size.Ports, Limit: b.quotas.limits.PortsPerService}, nil, 0
	case !u.admits(name) && u.verdict.RecordLimit != "":
		return overrun(u.verdict.RecordLimit), nil, 0
	}
	for slice := range packed {
		if !u.admits(slice) {
			count++
		}
	}
	if count == 0 || u.verdict.SliceLimit == "" {
		return nil, nil, 0
	}
	return nil, overrun(u.verdict.SliceLimit), count
}
