package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/isthmus-net/isthmus/agent"
	"github.com/isthmus-net/isthmus/bpf"
	"github.com/isthmus-net/isthmus/bpf/datapath"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// sight serves what goes on on the node, to those who may see it.
type sight struct {
	cfg       *Config
	access    access
	dataplane *agent.Agent
	names     *nameserver
	current   func() status.Agent
}

func (s *sight) register(mux *http.ServeMux) {
	mux.HandleFunc("GET "+status.ExplainPath, s.access.guard(s.explain))
	mux.HandleFunc("GET "+status.ObservePath, s.access.guard(s.observe))
	mux.HandleFunc("GET "+status.RecordsPath, s.access.guardNode(s.serveRecords))
	mux.HandleFunc("GET "+status.AskPath, s.access.guard(askServers))
	for _, name := range status.ShowTables() {
		mux.HandleFunc("GET "+status.ShowPath+name, s.access.guard(func(w http.ResponseWriter, r *http.Request) { s.show(w, r, name) }))
	}
}

func (s *sight) show(w http.ResponseWriter, r *http.Request, name string) {
	limit, err := strconv.Atoi(cmp.Or(r.FormValue("limit"), strconv.Itoa(defaultLimit)))
	if err != nil || limit < 1 {
		http.Error(w, fmt.Sprintf("limit=%s is not a number of 1 or more", r.FormValue("limit")), http.StatusBadRequest)
		return
	}
	t, err := readTable(r.Context(), s.cfg, name, limit)
	writeAnswer(w, t, err)
}

func (s *sight) explain(w http.ResponseWriter, r *http.Request) {
	name := clusterset.ServiceName{Namespace: r.FormValue("namespace"), Name: r.FormValue("name")}
	if name.Namespace == "" || name.Name == "" {
		http.Error(w, "name a Service by namespace= and name=", http.StatusBadRequest)
		return
	}
	var resolver netip.Addr
	if text := r.FormValue("resolver"); text != "" {
		var err error
		if resolver, err = netip.ParseAddr(text); err != nil {
			http.Error(w, fmt.Sprintf("resolver=%s is no address", text), http.StatusBadRequest)
			return
		}
	}
	x, err := s.dataplane.Explain(name)
	if err != nil {
		writeAnswer(w, nil, err)
		return
	}
	writeAnswer(w, explanation(s.current(), name, x, ask(r.Context(), s.names, resolver, name)), nil)
}

// writeAnswer writes v as JSON, or err.
func writeAnswer(w http.ResponseWriter, v any, err error) {
	body, encodeErr := json.MarshalIndent(v, "", "  ")
	if err := errors.Join(err, encodeErr); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // the reader went away: nobody to tell
}

// heartbeat is how often a reader of events hears that there are none.
const heartbeat = 10 * time.Second

func (s *sight) observe(w http.ResponseWriter, r *http.Request) {
	watch, err := parseWatch(r.FormValue)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := &lines{w: w}
	if out.write(nil) != nil { // the reader sees that somebody is there
		return
	}
	ctx, stop := context.WithCancel(r.Context())
	beats := make(chan struct{})
	go func() {
		defer close(beats)
		out.beat(ctx)
	}()
	defer func() { stop(); <-beats }()
	err = s.dataplane.Observe(ctx, watch, func(e datapath.Event, lost uint64) error {
		return out.tell(eventOf(e, s.cfg.NodeName, lost))
	})
	if err != nil && ctx.Err() == nil {
		_ = out.tell(status.Event{Time: time.Now(), Node: s.cfg.NodeName, Error: err.Error()}) // or it is the reader who is gone
	}
}

// lines writes lines to one reader, from several goroutines.
type lines struct {
	mu sync.Mutex
	w  http.ResponseWriter
}

// beat writes an empty line now and then, until ctx ends.
func (l *lines) beat(ctx context.Context) {
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = l.write(nil) // that the reader is gone shows elsewhere
		}
	}
}

func (l *lines) tell(e status.Event) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return l.write(line)
}

func (l *lines) write(line []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.w.Write(append(line, '\n')); err != nil {
		return err
	}
	return http.NewResponseController(l.w).Flush()
}

// parseWatch reads what somebody wants to see from the parameters of a request.
func parseWatch(value func(string) string) (agent.EventFilter, error) {
	w := agent.EventFilter{Rate: 1}
	if text := value("sample"); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil || n == 0 {
			return w, fmt.Errorf("sample=%s is not a number of 1 or more: one of so many choices is shown", text)
		}
		w.Rate = uint32(n)
	}
	if text := value("service"); text != "" {
		namespace, name, ok := strings.Cut(text, "/")
		if !ok || namespace == "" || name == "" {
			return w, fmt.Errorf("service=%s is not NAMESPACE/NAME", text)
		}
		w.Service = clusterset.ServiceName{Namespace: namespace, Name: name}
	}
	if text := value("reason"); text != "" {
		for r := bpf.DropNone + 1; r < bpf.DropMax && w.Reason == bpf.DropNone; r++ {
			if r.String() == text {
				w.Reason = r
			}
		}
		if w.Reason == bpf.DropNone {
			return w, fmt.Errorf("reason=%s is unknown", text)
		}
	}
	if text := value("refused"); text != "" {
		var err error
		if w.Refused, err = strconv.ParseBool(text); err != nil {
			return w, fmt.Errorf("refused=%s is not true or false", text)
		}
	}
	return w, nil
}

// eventOf spells an event out.
func eventOf(e datapath.Event, node string, lost uint64) status.Event {
	out := status.Event{
		Time: e.Time, Node: node, Verdict: "chosen", Path: "socket", Protocol: e.Protocol.String(), Service: nameText(e.Service),
		Client: e.Client, VIP: e.VIP, Backend: e.Backend, Cluster: string(e.Cluster), Netns: e.Netns, PID: e.PID, Command: e.Command, Lost: lost,
	}
	if e.Refused {
		out.Verdict, out.Reason = "refused", e.Reason.String()
	}
	if e.Packets {
		out.Path = "packet"
	}
	return out
}
