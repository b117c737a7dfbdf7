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
	gather = 5 * time.Millisecond
	// batch is how many go in one request at most, and maxBody what one may take.
	batch   = 4096
	maxBody = 4 << 20
	// maxAnswer is what all flows of a gateway may take, backlog of them, and hearing how long whoever starts waits for them.
	maxAnswer = 128 << 20
	hearing   = 3 * time.Second
	// backlog is how many wait for a gateway that does not answer. More are left out: all are told again in time.
	backlog = 1 << 18
	// keepEarly is how long flows wait for their backends: by then they are told again, or have ended.
	keepEarly = 2 * time.Minute
	// patience is how long a request may take, and pause until it is made again when it failed.
	patience = 5 * time.Second
	pause    = time.Second
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

	mu      sync.Mutex
	mates   map[desired.Mate]*mate
	changed chan struct{}      // closed when there is somebody new, or anew, who knows nothing yet
	refused uint64             // requests
	early   map[Flow]time.Time // flows that came before their backends, and when
	told    uint64             // how often Tell was called
	again   chan struct{}      // has something when early is to be looked at
}

// New returns an exchange that tells nobody yet.
func New(s Sharer, own *certs.Source, log *slog.Logger) *Exchange {
	return &Exchange{
		sharer: s, own: own, log: log, instance: rand.Text(), mates: map[desired.Mate]*mate{}, changed: make(chan struct{}),
		early: map[Flow]time.Time{}, again: make(chan struct{}, 1),
	}
}

// mate is another gateway, and what it is to be told.
type mate struct {
	desired.Mate
	client *http.Client
	stop   context.CancelFunc
	as     string       // our instance
	heed   func(string) // takes note of its own
	is     string       // that, "" until one is known; the exchange's mu guards it
	asked  bool         // for all that it knows; so does it this

	waits chan struct{} // has something when the queue may have
	back  chan struct{} // has something when it has come back, and need not be spared any more

	mu    sync.Mutex
	queue map[Flow]struct{}
	seen  MateSight // but for what the queue says
}

// Tell says who the other gateways are, from now on. It is called after the balancer has its VIPs and backends.
func (x *Exchange) Tell(mates []desired.Mate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.told++
	rouse(x.again)
	for id, m := range x.mates {
		if !slices.Contains(mates, id) {
			m.stop()
			delete(x.mates, id)
		}
	}
	anew := false
	for _, id := range mates {
		if _, ok := x.mates[id]; ok {
			continue
		}
		transport := &http.Transport{TLSClientConfig: x.client(id), ForceAttemptHTTP2: true, IdleConnTimeout: time.Minute}
		m := newMate(id, x.instance, transport)
		m.heed = func(instance string) { x.meet(m, instance) }
		ctx, stop := context.WithCancel(context.Background())
		m.stop = func() {
			stop()
			transport.CloseIdleConnections()
		}
		go m.talk(ctx, x.log)
		x.mates[id], anew = m, true
	}
	if anew {
		close(x.changed)
		x.changed = make(chan struct{})
	}
}

// Hear asks the other gateways that were not asked before, or all, for all their flows, and returns when those are known here, or
// after three seconds: whoever announces VIPs then gets packets of connections that it did not see begin. It is called after Tell.
// Who does not answer tells of them later, when it is there.
func (x *Exchange) Hear(ctx context.Context, everybody bool) {
	x.mu.Lock()
	var strangers []*mate
	for _, m := range x.mates {
		if everybody || !m.asked {
			m.asked = true
			strangers = append(strangers, m)
		}
	}
	x.mu.Unlock()
	inTime(ctx, strangers, func(ctx context.Context, m *mate) {
		all, err := m.ask(ctx)
		if err == nil {
			err = x.take(all, nil)
		}
		if err != nil {
			x.log.Info("another gateway does not say yet which connections there are", "gateway", m.Name, "err", err)
			return
		}
		m.heard(len(all))
	})
}

// inTime does something with each of some gateways, all at once, and returns when that is done; its ctx ends after three seconds.
func inTime(ctx context.Context, mates []*mate, do func(context.Context, *mate)) {
	ctx, cancel := context.WithTimeout(ctx, hearing)
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
func (x *Exchange) TellAll(ctx context.Context) {
	var all []Flow
	if err := x.sharer.All(func(f Flow) error {
		all = append(all, f)
		return nil
	}); err != nil {
		x.log.Warn("other gateways do not hear of all connections", "err", err)
	}
	x.mu.Lock()
	mates := slices.Collect(maps.Values(x.mates))
	x.mu.Unlock()
	inTime(ctx, mates, func(ctx context.Context, m *mate) {
		for some := range slices.Chunk(all, batch) {
			err := m.send(ctx, some)
			m.note(len(some), err)
			if err != nil {
				x.log.Warn("another gateway does not hear of all connections", "gateway", m.Name, "err", err)
				return
			}
		}
	})
}

func newMate(id desired.Mate, as string, transport http.RoundTripper) *mate {
	return &mate{
		Mate: id, as: as, heed: func(string) {}, client: &http.Client{Transport: transport, Timeout: patience},
		waits: make(chan struct{}, 1), back: make(chan struct{}, 1), queue: map[Flow]struct{}{}, seen: MateSight{Gateway: id.Name, URL: id.URL},
	}
}

func (x *Exchange) client(id desired.Mate) *tls.Config { return x.own.Client(id.Name) }

// Run tells of the balancer's flows until ctx is done.
func (x *Exchange) Run(ctx context.Context) {
	defer x.Tell(nil)
	var waiting sync.WaitGroup
	defer waiting.Wait()
	waiting.Go(func() { x.retry(ctx) })
	for ctx.Err() == nil {
		x.mu.Lock()
		changed := x.changed
		x.mu.Unlock()
		if err := x.export(ctx, changed); err != nil && ctx.Err() == nil {
			x.log.Warn("other gateways hear nothing of new connections for now", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	}
}

// export tells until somebody is new.
func (x *Exchange) export(ctx context.Context, changed <-chan struct{}) error {
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
		for _, m := range x.mates {
			m.add(f)
		}
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (m *mate) add(f Flow) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.queue) >= backlog {
		m.seen.LeftOut++
		return
	}
	m.queue[f] = struct{}{}
	rouse(m.waits)
}

// rouse lets whoever waits look again.
func rouse(waits chan<- struct{}) {
	select {
	case waits <- struct{}{}:
	default:
	}
}

// take returns some flows that wait, and takes them out.
func (m *mate) take() (some []Flow) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for f := range m.queue {
		if len(some) == batch {
			rouse(m.waits)
			break
		}
		some = append(some, f)
		delete(m.queue, f)
	}
	return some
}

// talk sends what waits until ctx is done. It begins at once, with whatever there is: who hears of a gateway that has just started
// tells it what it knows.
func (m *mate) talk(ctx context.Context, log *slog.Logger) {
	for silent, met := false, false; ; {
		if met {
			select {
			case <-ctx.Done():
				return
			case <-m.waits:
			}
		}
		some := m.take()
		if len(some) == 0 && met {
			continue
		}
		wait := gather
		err := m.send(ctx, some)
		m.note(len(some), err)
		if err != nil && ctx.Err() == nil {
			for _, f := range some {
				m.add(f)
			}
			m.client.CloseIdleConnections() // with a machine that went without a word
			wait = pause
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
		case <-m.back:
		case <-time.After(wait):
		}
	}
}

func (m *mate) send(ctx context.Context, some []Flow) error {
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
	request.Header.Set(instanceHeader, m.as)
	response, err := m.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // an answer of which only a part comes is answer enough
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(said))
	}
	m.heed(response.Header.Get(instanceHeader))
	return nil
}

// ask returns all flows of the other gateway.
func (m *mate) ask(ctx context.Context) ([]Flow, error) {
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
func (x *Exchange) answer(w io.Writer) error {
	all := []Flow{}
	if err := x.sharer.All(func(f Flow) error {
		if len(all) < backlog {
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
	from, err := x.verify(r.TLS)
	if err != nil {
		refuse(http.StatusForbidden, "%v", err)
		return
	}
	switch r.Method {
	case http.MethodPost:
	case http.MethodGet:
		if err := x.answer(w); err != nil {
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
	if err := x.take(some, nil); err != nil {
		x.log.Warn("connections of another gateway are not known here", "err", err)
		refuse(http.StatusInternalServerError, "%v", err)
		return
	}
	from.heard(len(some))
	from.heed(r.Header.Get(instanceHeader))
	w.Header().Set(instanceHeader, x.instance)
	w.WriteHeader(http.StatusNoContent)
}

// meet tells a gateway all flows again when it is another process than before: it was away, and may have lost what it knew. The first
// one that is heard of has lost nothing: what is to be told waits until somebody takes it, who then says who it is.
func (x *Exchange) meet(m *mate, instance string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	was := m.is
	m.is = instance
	if was == instance || was == "" {
		return
	}
	rouse(m.back)
	close(x.changed)
	x.changed = make(chan struct{})
}

// take makes flows known. Those that are early are kept; since tells of those that were kept before when they came.
func (x *Exchange) take(some []Flow, since map[Flow]time.Time) error {
	for len(some) > 0 {
		x.mu.Lock()
		told := x.told
		x.mu.Unlock()
		early, err := x.sharer.Import(some)
		if err != nil {
			return err
		}
		if x.keep(early, since, told) {
			return nil
		}
		some = early // there are other backends since then
	}
	return nil
}

// keep keeps flows until the next Tell, unless there was one since told was read; it reports whether it did.
func (x *Exchange) keep(early []Flow, since map[Flow]time.Time, told uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.told != told {
		return false
	}
	for _, f := range early {
		at, waited := since[f]
		if !waited {
			at = time.Now()
		}
		if len(x.early) < backlog {
			x.early[f] = at
		}
	}
	return true
}

// retry makes flows known that came early, after each Tell, and forgets those that waited for too long, until ctx is done.
func (x *Exchange) retry(ctx context.Context) {
	tick := time.NewTicker(keepEarly / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			x.forget()
			continue
		case <-x.again:
		}
		x.mu.Lock()
		waiting := x.early
		x.early = map[Flow]time.Time{}
		x.mu.Unlock()
		if err := x.take(slices.Collect(maps.Keys(waiting)), waiting); err != nil {
			x.log.Warn("connections of another gateway are not known here", "err", err)
		}
	}
}

// forget forgets flows that waited for too long.
func (x *Exchange) forget() {
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.early, func(_ Flow, at time.Time) bool { return time.Since(at) > keepEarly })
}

// verify returns which of the group's gateways is at the other end.
func (x *Exchange) verify(c *tls.ConnectionState) (*mate, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	errs := []error{errors.New("only gateways of the group are heard")}
	for id, m := range x.mates {
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
