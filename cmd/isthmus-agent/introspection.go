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
	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// introspection serves the state and the events of the node.
type introspection struct {
	cfg       *Config
	dataplane *agent.Agent
	names     *nameserver
	current   func() status.Agent
}

// register adds the handlers to a server.
func (in *introspection) register(handle func(pattern string, h http.Handler)) {
	for path, h := range map[string]http.HandlerFunc{
		status.ExplainPath: in.explain, status.ObservePath: in.observe, status.RecordsPath: in.serveRecords, status.AskPath: askServers,
	} {
		handle("GET "+path, h)
	}
	for _, name := range status.ShowTables() {
		handle("GET "+status.ShowPath+name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { in.show(w, r, name) }))
	}
}

func (in *introspection) show(w http.ResponseWriter, r *http.Request, name string) {
	limit, err := strconv.Atoi(cmp.Or(r.FormValue("limit"), strconv.Itoa(defaultLimit)))
	if err != nil || limit < 1 {
		http.Error(w, fmt.Sprintf("limit=%s is not a number of 1 or more", r.FormValue("limit")), http.StatusBadRequest)
		return
	}
	t, err := readTable(r.Context(), in.cfg, name, limit)
	writeAnswer(w, t, err)
}

func (in *introspection) explain(w http.ResponseWriter, r *http.Request) {
	name := clusterset.ServiceName{Namespace: r.FormValue("namespace"), Name: r.FormValue("name")}
	if name.Namespace == "" || name.Name == "" {
		http.Error(w, "give a Service as namespace= and name=", http.StatusBadRequest)
		return
	}
	var resolver netip.Addr
	if text := r.FormValue("resolver"); text != "" {
		var err error
		if resolver, err = netip.ParseAddr(text); err != nil {
			http.Error(w, fmt.Sprintf("resolver=%s is not an address", text), http.StatusBadRequest)
			return
		}
	}
	x, err := in.dataplane.Explain(name)
	if err != nil {
		writeAnswer(w, nil, err)
		return
	}
	writeAnswer(w, explanation(in.current(), name, x, ask(r.Context(), in.names, resolver, name)), nil)
}

// writeAnswer writes v as JSON, or err.
func writeAnswer(w http.ResponseWriter, v any, err error) {
	body, encodeErr := json.MarshalIndent(v, "", "  ")
	if err := errors.Join(err, encodeErr); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(append(body, '\n')) // an error means that the client is gone
}

// heartbeat is the interval of the empty lines that keep a connection without events alive.
const heartbeat = 10 * time.Second

func (in *introspection) observe(w http.ResponseWriter, r *http.Request) {
	watch, err := parseWatch(r.FormValue)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := &eventWriter{w: w, extend: httpserver.Stream(w)}
	if out.write(nil) != nil { // sends the response header at once
		return
	}
	ctx, stop := context.WithCancel(r.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		out.sendHeartbeats(ctx)
	}()
	defer func() { stop(); <-done }()
	err = in.dataplane.Observe(ctx, watch, func(e datapath.Event, lost uint64) error {
		return out.send(eventOf(e, in.cfg.NodeName, lost))
	})
	if err != nil && ctx.Err() == nil {
		_ = out.send(status.Event{Time: time.Now(), Node: in.cfg.NodeName, Error: err.Error()}) // fails if the client is gone
	}
}

// eventWriter writes lines to one client. Several goroutines may use it.
type eventWriter struct {
	mu     sync.Mutex
	w      http.ResponseWriter
	extend func() // gives the client time to read the next line
}

// sendHeartbeats writes an empty line at each heartbeat until ctx is done.
func (w *eventWriter) sendHeartbeats(ctx context.Context) {
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			_ = w.write(nil) // if the client is gone, ctx ends
		}
	}
}

// send writes an event as one line.
func (w *eventWriter) send(e status.Event) error {
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return w.write(line)
}

func (w *eventWriter) write(line []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.extend()
	if _, err := w.w.Write(append(line, '\n')); err != nil {
		return err
	}
	return http.NewResponseController(w.w).Flush()
}

// parseWatch returns the filter of events in the parameters of a request.
func parseWatch(value func(string) string) (agent.EventFilter, error) {
	w := agent.EventFilter{Rate: 1}
	if text := value("sample"); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil || n == 0 {
			return w, fmt.Errorf("sample=%s is not a number of 1 or more: one in so many events is shown", text)
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

// eventOf converts an event.
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
