package flows

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/gateway/certs"
	"github.com/isthmus-net/isthmus/gateway/desired"
)

// Path is where gateways tell one another of flows: POST, with a JSON array of Flow.
const Path = "/v1/flows"

const (
	// gather is how long after a request the next one is made: who comes alone is told of at once, and those that come in
	// between go together. What is not told yet may break when this gateway dies, so it is short.
	gather = 5 * time.Millisecond
	// batch is how many go in one request at most, and maxBody what one may take.
	batch   = 4096
	maxBody = 4 << 20
	// backlog is how many wait for a gateway that does not answer. More are left out: all are told again in time.
	backlog = 1 << 18
	// patience is how long a request may take, and pause until it is made again when it failed.
	patience = 5 * time.Second
	pause    = time.Second
)

// Sharer is a balancer whose connections can go on at another gateway.
type Sharer interface {
	// Export tells of all flows that are there, then of each that opens, and of all again in time, until ctx is done or
	// tell fails. One at a time may run.
	Export(ctx context.Context, tell func(Flow) error) error
	// Import makes flows of another gateway known. Any goroutine may call it.
	Import(all []Flow) error
}

// Exchange tells the other gateways of the group of a balancer's flows, and the balancer of theirs. What gets lost on the
// way is told again: nothing waits for it.
type Exchange struct {
	sharer Sharer
	own    *certs.Source
	log    *slog.Logger

	mu      sync.Mutex
	mates   map[desired.Mate]*mate
	changed chan struct{} // closed when there is somebody new, who knows nothing yet
	refused uint64        // requests
}

// New returns an exchange that tells nobody yet.
func New(s Sharer, own *certs.Source, log *slog.Logger) *Exchange {
	return &Exchange{sharer: s, own: own, log: log, mates: map[desired.Mate]*mate{}, changed: make(chan struct{})}
}

// mate is another gateway, and what it is to be told.
type mate struct {
	desired.Mate
	client *http.Client
	stop   context.CancelFunc

	waits chan struct{} // has something when the queue may have

	mu    sync.Mutex
	queue map[Flow]struct{}
	seen  MateSight // but for what the queue says
}

// Tell says who the other gateways are, from now on.
func (x *Exchange) Tell(mates []desired.Mate) {
	x.mu.Lock()
	defer x.mu.Unlock()
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
		m := newMate(id, transport)
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

func newMate(id desired.Mate, transport http.RoundTripper) *mate {
	return &mate{
		Mate: id, client: &http.Client{Transport: transport, Timeout: patience},
		waits: make(chan struct{}, 1), queue: map[Flow]struct{}{}, seen: MateSight{Gateway: id.Name, URL: id.URL},
	}
}

func (x *Exchange) client(id desired.Mate) *tls.Config { return x.own.Client(id.Name) }

// Run tells of the balancer's flows until ctx is done.
func (x *Exchange) Run(ctx context.Context) {
	defer x.Tell(nil)
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
	m.rouse()
}

// rouse lets talk look into the queue.
func (m *mate) rouse() {
	select {
	case m.waits <- struct{}{}:
	default:
	}
}

// take returns some flows that wait, and takes them out.
func (m *mate) take() (some []Flow) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for f := range m.queue {
		if len(some) == batch {
			m.rouse()
			break
		}
		some = append(some, f)
		delete(m.queue, f)
	}
	return some
}

// talk sends what waits until ctx is done.
func (m *mate) talk(ctx context.Context, log *slog.Logger) {
	for silent := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-m.waits:
		}
		some := m.take()
		if len(some) == 0 {
			continue
		}
		wait := gather
		err := m.send(ctx, some)
		m.note(len(some), err)
		if err != nil && ctx.Err() == nil {
			for _, f := range some {
				m.add(f)
			}
			wait = pause
			if !silent {
				log.Warn("another gateway does not hear of connections", "gateway", m.Name, "err", err)
			}
		}
		if err == nil && silent {
			log.Info("another gateway hears of connections again", "gateway", m.Name)
		}
		silent = err != nil
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (m *mate) send(ctx context.Context, some []Flow) error {
	body, err := json.Marshal(some)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, m.URL+Path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := m.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	said, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // an answer of which only a part comes is answer enough
	if response.StatusCode != http.StatusNoContent {
		return fmt.Errorf("%s: %s", response.Status, bytes.TrimSpace(said))
	}
	return nil
}

// ServeHTTP takes what another gateway tells. Nobody else is heard.
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
	if r.Method != http.MethodPost {
		refuse(http.StatusMethodNotAllowed, "want POST with flows")
		return
	}
	var some []Flow
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&some); err != nil {
		refuse(http.StatusBadRequest, "read flows: %v", err)
		return
	}
	for i := range some {
		if err := some[i].validate(); err != nil {
			refuse(http.StatusBadRequest, "[%d]: %v", i, err)
			return
		}
	}
	if err := x.sharer.Import(some); err != nil {
		x.log.Warn("connections of another gateway are not known here", "err", err)
		refuse(http.StatusInternalServerError, "%v", err)
		return
	}
	from.heard(len(some))
	w.WriteHeader(http.StatusNoContent)
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
