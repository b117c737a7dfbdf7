package flows

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Path is the endpoint for flows. POST sends a JSON array of Flow, or a stream of them (streamType). GET returns all flows of the gateway.
const Path = "/v1/flows"

// instanceHeader carries a random id of the process. A new id tells a peer that the gateway restarted and may have lost
// what it knew.
const instanceHeader = "Isthmus-Instance"

const (
	// batchInterval is the pause between two arrays to a peer. A single flow is sent at once; those that follow within
	// the pause go together. It is short, because a flow that no peer knows breaks when this gateway dies.
	batchInterval = 5 * time.Millisecond
	// maxBatch bounds the flows of one array, and maxBody its size in bytes.
	maxBatch = 4096
	maxBody  = 4 << 20
	// maxAnswer bounds the answer to GET in bytes, enough for maxQueued flows. syncTimeout bounds PullAll and PushAll.
	maxAnswer   = 128 << 20
	syncTimeout = 3 * time.Second
	// maxQueued bounds the flows queued for a peer that does not answer. More are dropped; the next full export sends
	// them.
	maxQueued = 1 << 18
	// pendingTimeout is how long a flow waits for its VIP and backend. By then it is sent again, or has ended.
	pendingTimeout = 2 * time.Minute
	// requestTimeout is how long an array waits for its acknowledgement, and retryInterval is the pause after a failed
	// stream. reachInterval is the pause before PullAll asks a peer again that could not be reached.
	requestTimeout = 5 * time.Second
	retryInterval  = time.Second
	reachInterval  = 50 * time.Millisecond
	// silence is how long a peer may leave an array without acknowledgement before it is absent. questionInterval is the longest pause
	// between two arrays on a stream: without flows, an empty one asks the peer.
	silence          = 2 * time.Second
	questionInterval = 500 * time.Millisecond
)

// Sharer is a balancer whose connections can continue at another gateway.
type Sharer interface {
	// Export passes to send all flows that exist, then each flow that opens, and all of them again from time to time,
	// until ctx is done or send fails. Only one call may run at a time.
	Export(ctx context.Context, send func(Flow) error) error
	// All passes to send all flows that exist, also the short-lived ones that Export omits, until send fails. Any
	// goroutine may call it.
	All(send func(Flow) error) error
	// Import adds flows of a peer, and returns those whose VIP or backend this gateway does not have. Any goroutine may
	// call it.
	Import(all []Flow) (pending []Flow, err error)
}

// Hander is a Sharer that hands packets over to peers.
type Hander interface {
	// SetAbsent replaces the names of the peers to which nothing may be handed over, because their machines were silent and their agents
	// have accepted no flows since: whatever they receive, they may not translate. Any goroutine may call it.
	SetAbsent(peers map[string]bool) error
}

// Exchange sends the flows of a balancer to its peers, the other gateways of the group, and theirs to the balancer. A
// lost flow is repaired by the next full export, so nothing waits for a delivery.
//
// The controller configures one gateway after another. A peer may therefore send flows with a backend that this gateway
// does not have yet. Exchange keeps those until SetPeers is called next.
type Exchange struct {
	sharer Sharer
	own    *certs.Source
	log    *slog.Logger
	// instance identifies this process to peers.
	instance string

	mu           sync.Mutex
	peers        map[desired.PeerGateway]*peer
	exportAgain  chan struct{}      // closed when a peer is new or has restarted, and needs all flows
	refused      uint64             // requests of peers
	pending      map[Flow]time.Time // flows that wait for their VIP or backend, by arrival
	revision     uint64             // number of SetPeers calls
	retryPending signal.Signal      // notified when pending flows may be importable

	telling sync.Mutex // held while the balancer is told which peers are absent; taken before mu
}

// New returns an exchange without peers.
func New(s Sharer, own *certs.Source, log *slog.Logger) *Exchange {
	return &Exchange{
		sharer: s, own: own, log: log, instance: rand.Text(), peers: map[desired.PeerGateway]*peer{}, exportAgain: make(chan struct{}),
		pending: map[Flow]time.Time{}, retryPending: signal.New(),
	}
}

// SetPeers replaces the peers. Call it after the balancer has applied its VIPs and backends.
func (x *Exchange) SetPeers(peers []desired.PeerGateway) {
	defer x.tellAbsent() // a peer that is absent may have been removed
	x.mu.Lock()
	defer x.mu.Unlock()
	x.revision++
	x.retryPending.Notify()
	for id, p := range x.peers {
		if !slices.Contains(peers, id) {
			p.stop()
			delete(x.peers, id)
		}
	}
	added := false
	for _, id := range peers {
		if _, ok := x.peers[id]; ok {
			continue
		}
		transport := &http.Transport{TLSClientConfig: x.client(id), ForceAttemptHTTP2: true, IdleConnTimeout: time.Minute}
		p := newPeer(id, x.instance, transport)
		p.noteInstance = func(instance string) { x.onPeerInstance(p, instance) }
		p.noteAbsence = x.tellAbsent
		ctx, stop := context.WithCancel(context.Background())
		p.ctx, p.stop = ctx, func() {
			stop()
			transport.CloseIdleConnections()
		}
		go p.sendLoop(ctx, x.log)
		x.peers[id], added = p, true
	}
	if added {
		close(x.exportAgain)
		x.exportAgain = make(chan struct{})
	}
}

// PullAll imports all flows of the peers that were not asked before, or of every peer. It returns when they have answered
// or after three seconds. Call it after SetPeers and before VIPs are announced: from then on packets arrive of
// connections that began elsewhere. A peer that cannot be reached, as when this machine has just started, is asked again
// meanwhile. One that does not answer sends its flows later.
func (x *Exchange) PullAll(ctx context.Context, every bool) {
	x.mu.Lock()
	var from []*peer
	for _, p := range x.peers {
		if every || !p.pulled {
			p.pulled = true
			from = append(from, p)
		}
	}
	x.mu.Unlock()
	forEach(ctx, from, func(ctx context.Context, p *peer) {
		all, err := p.pullReachable(ctx)
		p.heard(err)
		if err == nil {
			err = x.importFlows(all, nil)
		}
		if err != nil {
			x.log.Info("a peer does not send its flows yet", "gateway", p.Name, "err", err)
			return
		}
		p.countReceived(len(all))
	})
}

// forEach calls do for all peers at once, with a deadline of three seconds, and waits for all of them.
func forEach(ctx context.Context, peers []*peer, do func(context.Context, *peer)) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	var calls sync.WaitGroup
	defer calls.Wait()
	for _, p := range peers {
		calls.Go(func() { do(ctx, p) })
	}
}

// PushAll sends peers every flow, including UDP flows that Export would delay. It returns when all have acknowledged or
// after three seconds. Call it before traffic moves to a peer: a reply that is already on its way to the client must
// belong to a flow that the peer knows.
func (x *Exchange) PushAll(ctx context.Context) {
	var all []Flow
	if err := x.sharer.All(func(f Flow) error {
		all = append(all, f)
		return nil
	}); err != nil {
		x.log.Warn("peers do not receive all flows", "err", err)
	}
	x.mu.Lock()
	peers := slices.Collect(maps.Values(x.peers))
	x.mu.Unlock()
	forEach(ctx, peers, func(ctx context.Context, p *peer) {
		for some := range slices.Chunk(all, maxBatch) {
			_, err := p.send(ctx, some)
			if err != nil {
				x.log.Warn("a peer does not receive all flows", "gateway", p.Name, "err", err)
				return
			}
		}
	})
}

func (x *Exchange) client(id desired.PeerGateway) *tls.Config { return x.own.Client(id.Name) }

// Run exports the flows of the balancer to the peers until ctx is done.
func (x *Exchange) Run(ctx context.Context) {
	defer x.SetPeers(nil)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	waiting.Go(func() { x.retry(ctx) })
	for ctx.Err() == nil {
		x.mu.Lock()
		changed := x.exportAgain
		x.mu.Unlock()
		if err := x.exportUntil(ctx, changed); err != nil && ctx.Err() == nil {
			x.log.Warn("peers do not receive new flows for now", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(retryInterval):
			}
		}
	}
}

// exportUntil exports flows until changed is closed.
func (x *Exchange) exportUntil(ctx context.Context, changed <-chan struct{}) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-changed:
			stop()
		case <-ctx.Done():
		}
	}()
	err := x.sharer.Export(ctx, func(f Flow) error {
		x.mu.Lock()
		defer x.mu.Unlock()
		for _, p := range x.peers {
			p.add(f)
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// read decodes the next array of flows that a peer sent. The error names the first invalid one.
func read(arrays *json.Decoder, from string) (some []Flow, err error) {
	if err := arrays.Decode(&some); err != nil {
		return nil, fmt.Errorf("read flows: %w", err)
	}
	for i := range some {
		if err := some[i].validate(); err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
		some[i].Gateway = from
	}
	return some, nil
}

// writeAll answers a GET with all flows of this gateway.
func (x *Exchange) writeAll(w io.Writer) error {
	all := []Flow{}
	if err := x.sharer.All(func(f Flow) error {
		if len(all) < maxQueued {
			all = append(all, f)
		}
		return nil
	}); err != nil {
		return err
	}
	_ = json.NewEncoder(w).Encode(all) // an error means that the client has gone
	return nil
}

// ServeHTTP imports the flows that a peer posts, and returns all flows of this gateway to a GET. It refuses everyone but
// the peers.
func (x *Exchange) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	refuse := func(code int, format string, args ...any) {
		x.countRefused()
		http.Error(w, fmt.Sprintf(format, args...), code)
	}
	isStream := r.Header.Get("Content-Type") == streamType
	if isStream {
		// Otherwise HTTP/1.1 sends no answer before the end of the body, not even a refusal.
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			refuse(http.StatusInternalServerError, "%v", err)
			return
		}
	}
	from, err := x.authenticate(r.TLS)
	if err != nil {
		refuse(http.StatusForbidden, "%v", err)
		return
	}
	w.Header().Set("Accept-Post", streamType)
	switch r.Method {
	case http.MethodPost:
	case http.MethodGet:
		if err := x.writeAll(w); err != nil {
			x.log.Warn("cannot send all flows to a peer", "err", err)
			refuse(http.StatusInternalServerError, "%v", err)
		}
		return
	default:
		refuse(http.StatusMethodNotAllowed, "want POST with flows, or GET")
		return
	}
	w.Header().Set(instanceHeader, x.instance)
	if isStream {
		from.noteInstance(r.Header.Get(instanceHeader))
		x.receive(w, r, from)
		return
	}
	some, err := read(json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)), from.Name)
	if err != nil {
		refuse(http.StatusBadRequest, "%v", err)
		return
	}
	if err := x.importFlows(some, nil); err != nil {
		x.log.Warn("cannot import flows of a peer", "err", err)
		refuse(http.StatusInternalServerError, "%v", err)
		return
	}
	from.countReceived(len(some))
	from.noteInstance(r.Header.Get(instanceHeader))
	w.WriteHeader(http.StatusNoContent)
}

// onPeerInstance exports all flows again when the peer restarted: it may have lost them. The first instance of a peer
// triggers no export, because its flows are still queued. It may have refused them, which it did until it had its state.
func (x *Exchange) onPeerInstance(p *peer, instance string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	was := p.instance
	if instance == "" || was == instance {
		return
	}
	p.instance = instance
	p.returned.Notify()
	if was == "" {
		return
	}
	close(x.exportAgain)
	x.exportAgain = make(chan struct{})
}

// tellAbsent tells the balancer which peers are absent.
func (x *Exchange) tellAbsent() {
	hander, ok := x.sharer.(Hander)
	if !ok {
		return
	}
	x.telling.Lock()
	defer x.telling.Unlock()
	absent := map[string]bool{}
	x.mu.Lock()
	for _, p := range x.peers {
		if p.isAbsent() {
			absent[p.Name] = true
		}
	}
	x.mu.Unlock()
	if err := hander.SetAbsent(absent); err != nil {
		x.log.Warn("packets may still be handed over to a peer that is absent, or not yet to one that is back", "err", err)
	}
}

// importFlows imports flows and keeps those that cannot be imported yet. since holds the arrival times of flows that were
// kept before.
func (x *Exchange) importFlows(some []Flow, since map[Flow]time.Time) error {
	for len(some) > 0 {
		x.mu.Lock()
		revision := x.revision
		x.mu.Unlock()
		pending, err := x.sharer.Import(some)
		if err != nil {
			return err
		}
		if x.keepPending(pending, since, revision) {
			return nil
		}
		some = pending // SetPeers was called meanwhile: the backends may be there now
	}
	return nil
}

// keepPending keeps flows until the next SetPeers. It reports false when SetPeers was called since revision was read.
func (x *Exchange) keepPending(pending []Flow, since map[Flow]time.Time, revision uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.revision != revision {
		return false
	}
	for _, f := range pending {
		at, waited := since[f]
		if !waited {
			at = time.Now()
		}
		if len(x.pending) < maxQueued {
			x.pending[f] = at
		}
	}
	return true
}

// retry imports pending flows after each SetPeers, and drops those that waited too long, until ctx is done.
func (x *Exchange) retry(ctx context.Context) {
	tick := time.NewTicker(pendingTimeout / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			x.expirePending()
			continue
		case <-x.retryPending.C():
		}
		x.mu.Lock()
		waiting := x.pending
		x.pending = map[Flow]time.Time{}
		x.mu.Unlock()
		if err := x.importFlows(slices.Collect(maps.Keys(waiting)), waiting); err != nil {
			x.log.Warn("cannot import flows of a peer", "err", err)
		}
	}
}

// expirePending drops flows that waited too long.
func (x *Exchange) expirePending() {
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.pending, func(_ Flow, at time.Time) bool { return time.Since(at) > pendingTimeout })
}

// authenticate returns the peer at the other end of a connection.
func (x *Exchange) authenticate(c *tls.ConnectionState) (*peer, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	errs := []error{errors.New("only gateways of the group may exchange flows")}
	for id, p := range x.peers {
		err := x.own.Verify(c, id.Name)
		if err == nil {
			return p, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}
