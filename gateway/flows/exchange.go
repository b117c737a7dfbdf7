package flows

import (
	"bytes"
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

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Path is where gateways tell one another of flows: POST, with a JSON array of Flow; GET answers with all of them.
const Path = "/v1/flows"

// instanceHeader tells one process of a gateway from the next one, which may know nothing any more.
const instanceHeader = "Isthmus-Instance"

const (
	// gather is how long after a request the next one is made: who comes alone is told of at once, and those that come in
	// between go together. What is not told yet may break when this gateway dies, so it is short.
	batchInterval = 5 * time.Millisecond
	// batch is how many go in one request at most, and maxBody what one may take.
	maxBatch = 4096
	maxBody  = 4 << 20
	// maxAnswer is what all flows of a gateway may take, backlog of them, and hearing how long whoever starts waits for them.
	maxAnswer   = 128 << 20
	syncTimeout = 3 * time.Second
	// backlog is how many wait for a gateway that does not answer. More are left out: all are told again in time.
	maxQueued = 1 << 18
	// keepEarly is how long flows wait for their backends: by then they are told again, or have ended.
	pendingTimeout = 2 * time.Minute
	// patience is how long a request may take, and pause until it is made again when it failed.
	requestTimeout = 5 * time.Second
	retryInterval  = time.Second
)

// Sharer is a balancer whose connections can go on at another gateway.
type Sharer interface {
	// Export tells of all flows that are there, then of each that opens, and of all again in time, until ctx is done or
	// tell fails. One at a time may run.
	Export(ctx context.Context, tell func(Flow) error) error
	// All tells of all flows that are there, also of those that Export leaves out since they may be over with the next packet, until
	// tell fails. Any goroutine may call it.
	All(tell func(Flow) error) error
	// Import makes flows of another gateway known, and returns those whose VIP or backend this gateway does not have.
	// Any goroutine may call it.
	Import(all []Flow) (early []Flow, err error)
}

// Exchange tells the other gateways of the group of a balancer's flows, and the balancer of theirs. What gets lost on the
// way is told again: nothing waits for it.
//
// A controller tells gateways of a backend one after another, so connections with it are told of before the next gateway
// has it. These are kept here until it does.
type Exchange struct {
	sharer Sharer
	own    *certs.Source
	log    *slog.Logger
	// instance is what others know this process by.
	instance string

	mu           sync.Mutex
	peers        map[desired.PeerGateway]*peer
	exportAgain  chan struct{}      // closed when there is somebody new, or anew, who knows nothing yet
	refused      uint64             // requests
	pending      map[Flow]time.Time // flows that came before their backends, and when
	revision     uint64             // how often Tell was called
	retryPending chan struct{}      // has something when early is to be looked at
}

// New returns an exchange that tells nobody yet.
func New(s Sharer, own *certs.Source, log *slog.Logger) *Exchange {
	return &Exchange{
		sharer: s, own: own, log: log, instance: rand.Text(), peers: map[desired.PeerGateway]*peer{}, exportAgain: make(chan struct{}),
		pending: map[Flow]time.Time{}, retryPending: make(chan struct{}, 1),
	}
}

// mate is another gateway, and what it is to be told.
type peer struct {
	desired.PeerGateway
	client       *http.Client
	stop         context.CancelFunc
	selfInstance string       // our instance
	noteInstance func(string) // takes note of its own
	instance     string       // that, "" until one is known; the exchange's mu guards it
	pulled       bool         // for all that it knows; so does it this

	queued   chan struct{} // has something when the queue may have
	returned chan struct{} // has something when it has come back, and need not be spared any more

	mu    sync.Mutex
	queue map[Flow]struct{}
	stats PeerStats // but for what the queue says
}

// Tell says who the other gateways are, from now on. It is called after the balancer has its VIPs and backends.
func (x *Exchange) SetPeers(mates []desired.PeerGateway) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.revision++
	signal(x.retryPending)
	for id, m := range x.peers {
		if !slices.Contains(mates, id) {
			m.stop()
			delete(x.peers, id)
		}
	}
	anew := false
	for _, id := range mates {
		if _, ok := x.peers[id]; ok {
			continue
		}
		transport := &http.Transport{TLSClientConfig: x.client(id), ForceAttemptHTTP2: true, IdleConnTimeout: time.Minute}
		m := newPeer(id, x.instance, transport)
		m.noteInstance = func(instance string) { x.onPeerInstance(m, instance) }
		ctx, stop := context.WithCancel(context.Background())
		m.stop = func() {
			stop()
			transport.CloseIdleConnections()
		}
		go m.sendLoop(ctx, x.log)
		x.peers[id], anew = m, true
	}
	if anew {
		close(x.exportAgain)
		x.exportAgain = make(chan struct{})
	}
}

// Hear asks the other gateways that were not asked before, or all, for all their flows, and returns when those are known here, or
// after three seconds: whoever announces VIPs then gets packets of connections that it did not see begin. It is called after Tell.
// Who does not answer tells of them later, when it is there.
func (x *Exchange) PullAll(ctx context.Context, everybody bool) {
	x.mu.Lock()
	var strangers []*peer
	for _, m := range x.peers {
		if everybody || !m.pulled {
			m.pulled = true
			strangers = append(strangers, m)
		}
	}
	x.mu.Unlock()
	forEach(ctx, strangers, func(ctx context.Context, m *peer) {
		all, err := m.pull(ctx)
		if err == nil {
			err = x.importFlows(all, nil)
		}
		if err != nil {
			x.log.Info("another gateway does not say yet which connections there are", "gateway", m.Name, "err", err)
			return
		}
		m.countReceived(len(all))
	})
}

// inTime does something with each of some gateways, all at once, and returns when that is done; its ctx ends after three seconds.
func forEach(ctx context.Context, mates []*peer, do func(context.Context, *peer)) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	var doing sync.WaitGroup
	defer doing.Wait()
	for _, m := range mates {
		doing.Go(func() { do(ctx, m) })
	}
}

// TellAll tells the other gateways of all flows that are here, also of those that are told of later if at all, and returns when they
// have heard, or after three seconds. Whoever is about to lead packets to them calls it first: an answer that is under way belongs to
// a flow that they know then.
func (x *Exchange) PushAll(ctx context.Context) {
	var all []Flow
	if err := x.sharer.All(func(f Flow) error {
		all = append(all, f)
		return nil
	}); err != nil {
		x.log.Warn("other gateways do not hear of all connections", "err", err)
	}
	x.mu.Lock()
	mates := slices.Collect(maps.Values(x.peers))
	x.mu.Unlock()
	forEach(ctx, mates, func(ctx context.Context, m *peer) {
		for some := range slices.Chunk(all, maxBatch) {
			err := m.send(ctx, some)
			m.countSent(len(some), err)
			if err != nil {
				x.log.Warn("another gateway does not hear of all connections", "gateway", m.Name, "err", err)
				return
			}
		}
	})
}

func newPeer(id desired.PeerGateway, as string, transport http.RoundTripper) *peer {
	return &peer{
		PeerGateway: id, selfInstance: as, noteInstance: func(string) {}, client: &http.Client{Transport: transport, Timeout: requestTimeout},
		queued: make(chan struct{}, 1), returned: make(chan struct{}, 1), queue: map[Flow]struct{}{}, stats: PeerStats{Gateway: id.Name, URL: id.URL},
	}
}

func (x *Exchange) client(id desired.PeerGateway) *tls.Config { return x.own.Client(id.Name) }

// Run tells of the balancer's flows until ctx is done.
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
			x.log.Warn("other gateways hear nothing of new connections for now", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(retryInterval):
			}
		}
	}
}

// export tells until somebody is new.
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
		for _, m := range x.peers {
			m.add(f)
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (m *peer) add(f Flow) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.queue) >= maxQueued {
		m.stats.Dropped++
		return
	}
	m.queue[f] = struct{}{}
	signal(m.queued)
}

// rouse lets whoever waits look again.
func signal(waits chan<- struct{}) {
	select {
	case waits <- struct{}{}:
	default:
	}
}

// take returns some flows that wait, and takes them out.
func (m *peer) take() (some []Flow) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for f := range m.queue {
		if len(some) == maxBatch {
			signal(m.queued)
			break
		}
		some = append(some, f)
		delete(m.queue, f)
	}
	return some
}

// talk sends what waits until ctx is done. It begins at once, with whatever there is: who hears of a gateway that has just started
// tells it what it knows.
func (m *peer) sendLoop(ctx context.Context, log *slog.Logger) {
	for silent, met := false, false; ; {
		if met {
			select {
			case <-ctx.Done():
				return
			case <-m.queued:
			}
		}
		some := m.take()
		if len(some) == 0 && met {
			continue
		}
		wait := batchInterval
		err := m.send(ctx, some)
		m.countSent(len(some), err)
		if err != nil && ctx.Err() == nil {
			for _, f := range some {
				m.add(f)
			}
			m.client.CloseIdleConnections() // with a machine that went without a word
			wait = retryInterval
			if !silent {
				log.Warn("another gateway does not hear of connections", "gateway", m.Name, "err", err)
			}
		}
		if err == nil && silent {
			log.Info("another gateway hears of connections again", "gateway", m.Name)
		}
		silent, met = err != nil, met || err == nil
		select {
		case <-ctx.Done():
			return
		case <-m.returned:
		case <-time.After(wait):
		}
	}
}

func (m *peer) send(ctx context.Context, some []Flow) error {
	if some == nil {
		some = []Flow{}
	}
	body, err := json.Marshal(some)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, m.URL+Path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set(instanceHeader, m.selfInstance)
	response, err := m.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // an answer of which only a part comes is answer enough
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(said))
	}
	m.noteInstance(response.Header.Get(instanceHeader))
	return nil
}

// ask returns all flows of the other gateway.
func (m *peer) pull(ctx context.Context) ([]Flow, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, m.URL+Path, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := m.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(response.Status)
	}
	return read(io.LimitReader(response.Body, maxAnswer))
}

// read returns the flows of a body. The error says which one is wrong.
func read(body io.Reader) (some []Flow, err error) {
	if err := json.NewDecoder(body).Decode(&some); err != nil {
		return nil, fmt.Errorf("read flows: %w", err)
	}
	for i := range some {
		if err := some[i].validate(); err != nil {
			return nil, fmt.Errorf("[%d]: %w", i, err)
		}
	}
	return some, nil
}

// answer writes all flows that are here.
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
	_ = json.NewEncoder(w).Encode(all) // whoever does not read it asked in vain
	return nil
}

// ServeHTTP takes what another gateway tells, and tells it what it asks for. Nobody else is heard.
func (x *Exchange) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	refuse := func(code int, format string, args ...any) {
		x.mu.Lock()
		x.refused++
		x.mu.Unlock()
		http.Error(w, fmt.Sprintf(format, args...), code)
	}
	from, err := x.authenticate(r.TLS)
	if err != nil {
		refuse(http.StatusForbidden, "%v", err)
		return
	}
	switch r.Method {
	case http.MethodPost:
	case http.MethodGet:
		if err := x.writeAll(w); err != nil {
			x.log.Warn("another gateway does not hear which connections there are", "err", err)
			refuse(http.StatusInternalServerError, "%v", err)
		}
		return
	default:
		refuse(http.StatusMethodNotAllowed, "want POST with flows, or GET")
		return
	}
	some, err := read(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		refuse(http.StatusBadRequest, "%v", err)
		return
	}
	if err := x.importFlows(some, nil); err != nil {
		x.log.Warn("connections of another gateway are not known here", "err", err)
		refuse(http.StatusInternalServerError, "%v", err)
		return
	}
	from.countReceived(len(some))
	from.noteInstance(r.Header.Get(instanceHeader))
	w.Header().Set(instanceHeader, x.instance)
	w.WriteHeader(http.StatusNoContent)
}

// meet tells a gateway all flows again when it is another process than before: it was away, and may have lost what it knew. The first
// one that is heard of has lost nothing: what is to be told waits until somebody takes it, who then says who it is.
func (x *Exchange) onPeerInstance(m *peer, instance string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	was := m.instance
	m.instance = instance
	if was == instance || was == "" {
		return
	}
	signal(m.returned)
	close(x.exportAgain)
	x.exportAgain = make(chan struct{})
}

// take makes flows known. Those that are early are kept; since tells of those that were kept before when they came.
func (x *Exchange) importFlows(some []Flow, since map[Flow]time.Time) error {
	for len(some) > 0 {
		x.mu.Lock()
		told := x.revision
		x.mu.Unlock()
		early, err := x.sharer.Import(some)
		if err != nil {
			return err
		}
		if x.keepPending(early, since, told) {
			return nil
		}
		some = early // there are other backends since then
	}
	return nil
}

// keep keeps flows until the next Tell, unless there was one since told was read; it reports whether it did.
func (x *Exchange) keepPending(early []Flow, since map[Flow]time.Time, told uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.revision != told {
		return false
	}
	for _, f := range early {
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

// retry makes flows known that came early, after each Tell, and forgets those that waited for too long, until ctx is done.
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
		case <-x.retryPending:
		}
		x.mu.Lock()
		waiting := x.pending
		x.pending = map[Flow]time.Time{}
		x.mu.Unlock()
		if err := x.importFlows(slices.Collect(maps.Keys(waiting)), waiting); err != nil {
			x.log.Warn("connections of another gateway are not known here", "err", err)
		}
	}
}

// forget forgets flows that waited for too long.
func (x *Exchange) expirePending() {
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.pending, func(_ Flow, at time.Time) bool { return time.Since(at) > pendingTimeout })
}

// verify returns which of the group's gateways is at the other end.
func (x *Exchange) authenticate(c *tls.ConnectionState) (*peer, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	errs := []error{errors.New("only gateways of the group are heard")}
	for id, m := range x.peers {
		err := x.own.Verify(c, id.Name)
		if err == nil {
			return m, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// validate returns what is wrong with a flow by itself.
func (f *Flow) validate() error {
	if f.Protocol != "TCP" && f.Protocol != "UDP" {
		return fmt.Errorf("protocol is %q; it can be \"TCP\" or \"UDP\"", f.Protocol)
	}
	four := f.VIP.Addr().Is4()
	for name, a := range map[string]struct{ is4, whole bool }{
		"client":  {f.Client.Addr().Is4(), f.Client.IsValid() && f.Client.Port() > 0},
		"vip":     {four, f.VIP.IsValid() && f.VIP.Port() > 0},
		"backend": {f.Backend.Addr().Is4(), f.Backend.IsValid() && f.Backend.Port() > 0},
		"source":  {f.Source.Addr().Is4(), f.Source.IsValid() && f.Source.Port() > 0},
	} {
		if !a.whole || a.is4 != four {
			return fmt.Errorf("%s is no address and port of the VIP's family", name)
		}
	}
	return nil
}
