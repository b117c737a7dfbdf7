package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// answers are servers that are not what a command asks for.
var answers = map[string]http.HandlerFunc{
	"nothing": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	"half": func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	},
	"starting": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "5")
		refuse(w, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable)
	},
	"busy": func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests)
	},
	"unauthorized": func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusUnauthorized, metav1.StatusReasonUnauthorized)
	},
	"forbidden": func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, http.StatusForbidden, metav1.StatusReasonForbidden)
	},
	"not found": func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) },
}

func refuse(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "no",
	})
}

// serve starts a server that answers so, until the test ends. It returns its URL.
func serve(t *testing.T, start func(*httptest.Server), answer http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewUnstartedServer(answer)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	start(server)
	t.Cleanup(server.Close)
	return server.URL
}

// run runs a command line in a folder of its own, with a kubeconfig k of the server, and returns what it
// prints and the sentence it ends with.
func run(t *testing.T, server string, args ...string) (stdout, stderr, last string) {
	t.Helper()
	t.Chdir(t.TempDir())
	config := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: c}}],
users: [{name: c, user: {token: t}}], clusters: [{name: c, cluster: {server: %q}}]}`, server)
	if err := os.WriteFile("k", []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, errs bytes.Buffer
	root := newCommand()
	root.SetArgs(append(args, "--kubeconfig", "k"))
	root.SetOut(&out)
	root.SetErr(&errs)
	if err := root.ExecuteContext(t.Context()); err != nil {
		last = strings.ReplaceAll(sentence(err), server, "SERVER")
	}
	return out.String(), errs.String(), last
}

// For every fault of an API server each command prints one sentence with the server and the remedy.
func TestFailingServers(t *testing.T) {
	commands := map[string][]string{
		"status":        {"status", "--timeout", "300ms"},
		"export":        {"export", "service", "hello", "-n", "demo", "--timeout", "300ms"},
		"deploy-broker": {"deploy-broker", "--timeout", "300ms"},
		"upgrade":       {"upgrade", "--plan", "--timeout", "300ms"},
	}
	const silent = "API server SERVER of kubeconfig k did not answer within 300ms; check the address and the firewalls between, or raise --timeout"
	for answer, want := range map[string]string{
		"nothing":      silent,
		"half":         silent,
		"starting":     "API server SERVER of kubeconfig k is not ready; it is starting or overloaded, try again soon",
		"busy":         "API server SERVER of kubeconfig k is not ready; it is starting or overloaded, try again soon",
		"unauthorized": "API server SERVER does not accept the credentials of kubeconfig k; they are wrong, revoked or expired; get new ones",
	} {
		for command, args := range commands {
			t.Run(command+" "+answer, func(t *testing.T) {
				stdout, stderr, last := run(t, serve(t, (*httptest.Server).Start, answers[answer]), args...)
				if last != want || stdout != "" || stderr != "" {
					t.Errorf("it says %q, prints %q and %q; want %q", last, stdout, stderr, want)
				}
			})
		}
	}
}

// A server that answers and is not the broker is an error; a server that does not answer is not.
func TestTryBroker(t *testing.T) {
	for name, tc := range map[string]struct {
		start      func(*httptest.Server)
		answer     string
		unanswered string
		err        string
	}{
		"silence":           {start: (*httptest.Server).Start, answer: "nothing", unanswered: "API server SERVER of --broker-server did not answer within 300ms; check the address and the firewalls between, or raise --timeout"},
		"starting":          {start: (*httptest.Server).Start, answer: "starting", unanswered: "API server SERVER of --broker-server is not ready; it is starting or overloaded, try again soon"},
		"another authority": {start: (*httptest.Server).StartTLS, answer: "not found", err: "API server SERVER of --broker-server has a certificate that is not trusted (x509: certificate signed by unknown authority); correct the address or the certificate authority"},
		"another server":    {start: (*httptest.Server).Start, answer: "not found", err: "API server SERVER of --broker-server is not the broker: it has no ClusterSetConfig b/clusterset; correct the address"},
		"it denies":         {start: (*httptest.Server).Start, answer: "forbidden", err: "API server SERVER of --broker-server is not the broker: it has no ClusterSetConfig b/clusterset; correct the address"},
		"other credentials": {start: (*httptest.Server).Start, answer: "unauthorized", err: "API server SERVER does not accept the credentials of broker-info f; they are wrong, revoked or expired; get new ones"},
	} {
		t.Run(name, func(t *testing.T) {
			server := serve(t, tc.start, answers[tc.answer])
			cfg := &rest.Config{Host: server, BearerToken: "t"}
			timeout := 30 * time.Second
			switch tc.answer { // what is waited for to the end
			case "nothing":
				timeout = 300 * time.Millisecond
			case "starting":
				timeout = 3 * time.Second
			}
			prepare(cfg, origin{address: "--broker-server", credentials: "broker-info f"}, timeout)
			unanswered, err := tryBroker(t.Context(), cfg, "b")
			var have, failed string
			if unanswered != nil {
				have = strings.ReplaceAll(unanswered.text, server, "SERVER")
			}
			if err != nil {
				failed = strings.ReplaceAll(sentence(err), server, "SERVER")
			}
			if have != tc.unanswered || failed != tc.err {
				t.Errorf("unanswered %q, error %q; want %q, %q", have, failed, tc.unanswered, tc.err)
			}
		})
	}
}
