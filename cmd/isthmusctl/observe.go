package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/tables"
	"github.com/isthmus-net/isthmus/cmd/internal/usage"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
)

// watch selects the events to observe.
type watch struct {
	service string // as in explain; "" means any
	reason  string
	refused bool
	sample  uint32
	last    int           // end after so many events; 0 means never
	period  time.Duration // end after so long; 0 means never
	nodes   []string
	format  string
}

func observeCommand() *cobra.Command {
	var t target
	var namespace string
	var w watch
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show connections as they are balanced or refused",
		Long: `Show new connections and their backends, and refused ones: one line per connection, from all nodes, until it is
interrupted. A client on the socket path has no address yet; its process is shown instead. The kernel creates these
events only while an observer runs. On busy nodes --sample reduces them; refusals are always shown.

The command needs the rights to read workloads, to reach pods through the API server (get pods/proxy) and to create a
token of ServiceAccount isthmus-observer, in the namespace of Isthmus.`,
		Example: `  isthmusctl observe --service hello.demo
  isthmusctl observe --refused --node worker-1
  isthmusctl observe --sample 100 --for 1m -o json`,
		Args: usage.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := w.validate(); err != nil {
				return err
			}
			c, err := t.collector(namespace)
			if err != nil {
				return err
			}
			streams := t
			streams.timeout = endless
			s, err := streams.collector(namespace)
			if err != nil {
				return err
			}
			return c.observe(cmd.Context(), s.pods, w, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	t.bind(f)
	t.bindTimeout(f)
	f.StringVarP(&namespace, "namespace", "n", v1alpha1.DefaultNamespace, "namespace in which Isthmus is installed")
	f.StringVarP(&w.format, "output", "o", "text", "text, or json: one object per line")
	f.StringSliceVar(&w.nodes, "node", nil, "node to observe, repeatable (default: all)")
	f.StringVar(&w.service, "service", "", "Service to observe, in the forms of isthmusctl explain (default: all)")
	f.StringVar(&w.reason, "reason", "", "show only refusals with this reason, such as no_backend")
	f.BoolVar(&w.refused, "refused", false, "show only refusals")
	f.Uint32Var(&w.sample, "sample", 1, "show one of this many balanced connections of a node")
	f.IntVar(&w.last, "last", 0, "stop after this many events (default: never)")
	f.DurationVar(&w.period, "for", 0, "stop after this time (default: never)")
	return cmd
}

// endless is the timeout of a stream, which the user ends.
const endless = 10 * 365 * 24 * time.Hour

func (w watch) validate() error {
	switch {
	case w.sample == 0:
		return errors.New("--sample=0 shows nothing; use 1 to show all, or N to show one of N")
	case w.last < 0:
		return fmt.Errorf("--last=%d is less than 0", w.last)
	case w.period < 0:
		return fmt.Errorf("--for=%s is less than 0", w.period)
	}
	if w.service != "" {
		if _, err := parseService(w.service); err != nil {
			return fmt.Errorf("--service: %w", err)
		}
	}
	return tables.CheckFormat(w.format)
}

// observe writes the events of all nodes until it is interrupted, or w's time or number of events is reached. It reports
// nodes that it cannot observe to complain, and returns an error if there are no others. streams connects to pods without
// a timeout.
func (c *collector) observe(ctx context.Context, streams rest.Interface, w watch, out, complain io.Writer) error {
	service := ""
	if w.service != "" {
		n, err := parseService(w.service)
		if err == nil && n.vip.IsValid() {
			n.key, err = c.ofAddress(ctx, n.vip)
		}
		if err != nil {
			return err
		}
		service = n.key.String()
	}
	pods, err := c.agentPods(ctx, w.nodes)
	if err != nil {
		return err
	}
	token, err := c.observerToken(ctx)
	if err != nil {
		return err
	}
	params := map[string]string{"service": service, "reason": w.reason, "sample": strconv.FormatUint(uint64(w.sample), 10)}
	if w.refused {
		params["refused"] = "true"
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if w.period > 0 {
		ctx, stop = context.WithTimeout(ctx, w.period)
		defer stop()
	}
	show := &eventPrinter{out: out, format: w.format, left: w.last, stop: stop}
	errs := make([]error, len(pods))
	var all sync.WaitGroup
	for i, pod := range pods {
		all.Go(func() {
			errs[i] = stream(ctx, streams, pod, withToken(token, status.ObservePath, params), show.event)
			if ctx.Err() == nil {
				fmt.Fprintf(complain, "node %s: %s\n", pod.Spec.NodeName, sentence(errs[i]))
			}
		})
	}
	all.Wait()
	if show.err != nil {
		return show.err
	}
	if ctx.Err() != nil {
		return nil // the regular end
	}
	return fmt.Errorf("no node can be observed: %w", errs[0])
}

// stream reads the events of one node until ctx ends. It always returns an error.
func stream(ctx context.Context, pods rest.Interface, pod corev1.Pod, request func(*rest.Request) *rest.Request, each func(status.Event)) error {
	get, port, err := proxy(pods, pod, status.AgentPort)
	if err != nil {
		return err
	}
	body, err := request(get).Stream(ctx)
	if err != nil {
		return unanswered(pod, port, []byte(err.Error()), err)
	}
	defer body.Close()
	events := json.NewDecoder(body)
	for {
		var e status.Event
		switch err := events.Decode(&e); {
		case errors.Is(err, io.EOF):
			return fmt.Errorf("pod %s closed the stream", pod.Name)
		case err != nil:
			return fmt.Errorf("read events of pod %s: %w", pod.Name, err)
		case e.Error != "":
			return fmt.Errorf("pod %s: %s", pod.Name, e.Error)
		}
		each(e)
	}
}

// eventPrinter prints the events of several nodes.
type eventPrinter struct {
	out    io.Writer
	format string
	stop   func()

	mu   sync.Mutex // guards what follows
	left int        // events to print; 0 means no limit
	done bool
	err  error
}

func (s *eventPrinter) event(e status.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return
	}
	if s.err = s.write(e); s.err != nil {
		s.done = true
	}
	if s.left > 0 {
		s.left--
		s.done = s.done || s.left == 0
	}
	if s.done {
		s.stop()
	}
}

func (s *eventPrinter) write(e status.Event) error {
	if s.format == "json" {
		return json.NewEncoder(s.out).Encode(e)
	}
	if e.Lost > 0 {
		if _, err := fmt.Fprintf(s.out, "%s: %d events lost, because there were too many; see --sample\n", e.Node, e.Lost); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintln(s.out, eventText(e))
	return err
}

// eventText formats an event for people.
func eventText(e status.Event) string {
	who := "a client"
	switch {
	case e.Client.IsValid():
		who = e.Client.String()
	case e.PID != 0:
		who = fmt.Sprintf("%s[%d]", cmp.Or(e.Command, "?"), e.PID)
	}
	where := "-> " + text(e.Backend)
	if e.Cluster != "" {
		where += " of " + e.Cluster
	}
	if e.Verdict == "refused" {
		where = "refused: " + e.Reason
	}
	return fmt.Sprintf("%s %s %s %s %s/%s %s (%s)",
		e.Time.Local().Format("15:04:05.000"), e.Node, cmp.Or(e.Service, "-"), who, text(e.VIP), e.Protocol, where, e.Path)
}

func text(a netip.AddrPort) string {
	if !a.IsValid() {
		return "-"
	}
	return a.String()
}
