package reviews

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

const namespace = "observers"

// testbed is an API server with accounts, and a server of ours that asks it.
type testbed struct {
	t      *testing.T
	admin  kubernetes.Interface
	config *rest.Config
	writes *apitest.Writes // of the server of ours
	server *httpserver.Server
	url    string
}

func newTestbed(t *testing.T) *testbed {
	t.Helper()
	return newTestbedAt(t, "127.0.0.1")
}

func newTestbedAt(t *testing.T, address string) *testbed {
	t.Helper()
	config := apitest.StartEmpty(t)
	w := &testbed{t: t, admin: kubernetes.NewForConfigOrDie(config), config: config}
	if _, err := w.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.role("metrics-reader", []string{"/metrics"}, "prometheus")
	w.role("observer", []string{"/status", "/observe", "/show/*"}, status.ObserverAccount)
	w.account("tenant")
	own := rest.CopyConfig(config)
	w.writes = apitest.CountWrites(own)
	access, err := New(own, status.TokenAudience)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	secure, err := httpserver.Flags{}.Config(log)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Fatal(err)
	}
	w.url = "https://" + l.Addr().String()
	w.server = httpserver.New(httpserver.Config{Listener: l, TLS: secure, Access: access, Log: log})
	for _, path := range []string{"/metrics", "/status", "/show/drops"} {
		w.server.Handle(path, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "secret") }))
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.server.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return w
}

// role creates an account with the right to paths.
func (w *testbed) role(name string, paths []string, account string) {
	w.t.Helper()
	w.account(account)
	meta := metav1.ObjectMeta{Name: name}
	_, err := w.admin.RbacV1().ClusterRoles().Create(w.t.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{NonResourceURLs: paths, Verbs: []string{"get"}}}}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	_, err = w.admin.RbacV1().ClusterRoleBindings().Create(w.t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: account, Namespace: namespace}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *testbed) account(name string) {
	w.t.Helper()
	_, err := w.admin.CoreV1().ServiceAccounts(namespace).Create(w.t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// token creates a token of an account; without audiences it is for the API server.
func (w *testbed) token(account string, audiences ...string) string {
	w.t.Helper()
	r, err := w.admin.CoreV1().ServiceAccounts(namespace).CreateToken(w.t.Context(), account, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{Audiences: audiences},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return r.Status.Token
}

// request is one attempt.
type request struct {
	method, path string // GET by default
	token        string // as a bearer
	header       map[string]string
	plain        bool // HTTP
}

func bearer(token, path string) request { return request{path: path, token: token} }

func observer(token, path string) request {
	return request{path: path, header: map[string]string{status.TokenHeader: token}}
}

// from returns a client with a source address.
func from(address string) *http.Client {
	c := httpserver.LocalClient()
	c.Timeout = time.Minute
	c.Transport.(*http.Transport).DialContext = (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}).DialContext
	return c
}

// do sends a request. Its path is sent as it is.
func (w *testbed) do(c *http.Client, r request) (code int, body string, err error) {
	if r.method == "" {
		r.method = http.MethodGet
	}
	url := w.url
	if r.plain {
		url = strings.Replace(url, "https:", "http:", 1)
	}
	req, err := http.NewRequestWithContext(w.t.Context(), r.method, url+r.path, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	if r.token != "" {
		req.Header.Set("Authorization", "Bearer "+r.token)
	}
	for k, v := range r.header {
		req.Header.Set(k, v)
	}
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// reviewed returns how many TokenReviews the server of ours sent since the last call.
func (w *testbed) reviewed() (n int) {
	for _, write := range w.writes.Take() {
		if strings.HasSuffix(write, "/tokenreviews") {
			n++
		}
	}
	return n
}

// Strangers are refused and counted, whatever they send, and in any number. All the while, an observer with the right is served.
func TestReadersOnly(t *testing.T) {
	w := newTestbed(t)
	good := w.token("prometheus")
	if code, body, err := w.do(from("127.0.0.2"), bearer(good, "/metrics")); code != http.StatusOK || body != "secret" {
		t.Fatalf("an observer gets %d %s, %v", code, body, err)
	}
	served := w.keepObserving(good)
	t.Run("attempts", func(t *testing.T) { w.attempts(t, good) })
	t.Run("junk tokens", w.junkTokens)
	t.Run("connections", w.connections)
	t.Run("slow clients", w.slowClients)
	if n := served(); n == 0 {
		t.Error("the observer was not served at all")
	}
	if code, _, err := w.do(from("127.0.0.2"), request{path: "/healthz"}); code != http.StatusOK {
		t.Errorf("the probe answers %d, %v", code, err)
	}
}

// keepObserving reads /metrics from another source again and again. The returned function ends it, and returns how often it was
// served.
func (w *testbed) keepObserving(token string) (end func() int) {
	ctx, stop := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	var served int
	running.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			// A new connection each time, and reviews again and again, are the harder case.
			if code, _, err := w.do(from("127.0.0.2"), bearer(token, "/metrics")); code != http.StatusOK {
				w.t.Errorf("the observer gets %d, %v", code, err)
				return
			}
			served++
		}
	})
	return func() int {
		stop()
		running.Wait()
		return served
	}
}

func (w *testbed) attempts(t *testing.T, good string) {
	t.Helper()
	w.account("removed")
	removed := w.token("removed")
	if err := w.admin.CoreV1().ServiceAccounts(namespace).Delete(t.Context(), "removed", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(good, ".")
	signature := []byte(parts[2])
	signature[10] ^= 3
	encode := base64.RawURLEncoding.EncodeToString
	claims, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		t.Fatal(err)
	}
	extended := bytes.Replace(claims, []byte(`"exp":`), []byte(`"exp":9`), 1)
	seen := w.token(status.ObserverAccount, status.TokenAudience)
	elsewhere := w.token(status.ObserverAccount, "vault")
	tenant := w.token("tenant")
	const none, invalid, forbidden = httpserver.NoToken, httpserver.InvalidToken, httpserver.Forbidden
	all := map[string]struct {
		request
		code   int
		reason string
	}{
		"no token":                             {request{path: "/metrics"}, 401, none},
		"no token, the status":                 {request{path: "/status"}, 401, none},
		"no token, introspection":              {request{path: "/show/drops"}, 401, none},
		"no token, an unknown path":            {request{path: "/debug/pprof/"}, 401, none},
		"no token, another method":             {request{method: http.MethodPost, path: "/metrics"}, 401, none},
		"no token, a probe by POST":            {request{method: http.MethodPost, path: "/healthz"}, 401, none},
		"a path below a probe":                 {request{path: "/healthz/../metrics"}, 401, none},
		"an empty token":                       {request{path: "/metrics", header: map[string]string{"Authorization": "Bearer "}}, 401, none},
		"a password":                           {request{path: "/metrics", header: map[string]string{"Authorization": "Basic YTpi"}}, 401, none},
		"the token without a scheme":           {request{path: "/metrics", header: map[string]string{"Authorization": good}}, 401, none},
		"the token as a parameter":             {request{path: "/metrics?access_token=" + good}, 401, none},
		"the token as a cookie":                {request{path: "/metrics", header: map[string]string{"Cookie": "token=" + good}}, 401, none},
		"the header of a proxy for users":      {request{path: "/metrics", header: map[string]string{"X-Remote-User": "system:admin", "X-Remote-Group": "system:masters"}}, 401, none},
		"the header of a proxy for addresses":  {request{path: "/metrics", header: map[string]string{"X-Forwarded-For": "127.0.0.1"}}, 401, none},
		"junk":                                 {bearer("junk", "/metrics"), 401, invalid},
		"junk like a token":                    {bearer("a.b.c", "/metrics"), 401, invalid},
		"a token of nobody's signature":        {bearer(encode([]byte(`{"alg":"none"}`))+"."+parts[1]+".", "/metrics"), 401, invalid},
		"another signature":                    {bearer(parts[0]+"."+parts[1]+"."+string(signature), "/metrics"), 401, invalid},
		"a later expiry":                       {bearer(parts[0]+"."+encode(extended)+"."+parts[2], "/metrics"), 401, invalid},
		"a token of a removed account":         {bearer(removed, "/metrics"), 401, invalid},
		"an observer's token for a vault":      {bearer(elsewhere, "/status"), 401, invalid},
		"the same, through the API server":     {observer(elsewhere, "/status"), 403, invalid},
		"a token for controllers":              {observer(w.token(status.ObserverAccount, status.ControllerAudience), "/status"), 403, invalid},
		"a token for the API server, proxied":  {observer(good, "/metrics"), 403, invalid},
		"junk, proxied":                        {observer("junk", "/status"), 403, invalid},
		"a tenant's token":                     {bearer(tenant, "/metrics"), 403, forbidden},
		"a tenant's token, the status":         {bearer(tenant, "/status"), 403, forbidden},
		"a tenant who impersonates":            {request{path: "/metrics", token: tenant, header: map[string]string{"Impersonate-User": "system:serviceaccount:observers:prometheus"}}, 403, forbidden},
		"Prometheus reads the status":          {bearer(good, "/status"), 403, forbidden},
		"Prometheus reads introspection":       {bearer(good, "/show/drops"), 403, forbidden},
		"Prometheus writes":                    {request{method: http.MethodPost, path: "/metrics", token: good}, 403, forbidden},
		"Prometheus by a path that is unclean": {bearer(good, "/metrics/../status"), 403, forbidden},
		"an observer reads metrics":            {bearer(seen, "/metrics"), 403, forbidden},
	}
	n := 20 // each attempt has a source of its own, so that no budget hides the reason
	for name, c := range all {
		n++
		before := w.count(c.reason)
		code, body, err := w.do(from(fmt.Sprintf("127.0.0.%d", n)), c.request)
		if code != c.code || strings.Contains(body, "secret") {
			t.Errorf("%s: %d %s, %v, want %d", name, code, body, err, c.code)
		}
		if after := w.count(c.reason); after != before+1 {
			t.Errorf("%s: refusals for %s went from %d to %d", name, c.reason, before, after)
		}
	}
	for name, r := range map[string]request{
		"an observer": observer(seen, "/status"), "an observer, introspection": observer(seen, "/show/drops"), "an observer by a bearer": bearer(seen, "/status"),
	} {
		if code, body, err := w.do(from("127.0.0.3"), r); code != http.StatusOK || body != "secret" {
			t.Errorf("%s gets %d %s, %v", name, code, body, err)
		}
	}
	stolen := kubernetes.NewForConfigOrDie(&rest.Config{Host: w.config.Host, BearerToken: seen, TLSClientConfig: rest.TLSClientConfig{CAData: w.config.CAData}})
	if _, err := stolen.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("the API server answers an observer's token with %v", err)
	}
	c := from("127.0.0.4")
	c.Transport.(*http.Transport).TLSClientConfig.MaxVersion = tls.VersionTLS12
	c.Transport.(*http.Transport).TLSClientConfig.MinVersion = tls.VersionTLS12
	if _, _, err := w.do(c, bearer(good, "/metrics")); err == nil {
		t.Error("TLS 1.2 is accepted")
	}
	if code, body, _ := w.do(from("127.0.0.4"), request{path: "/metrics", token: good, plain: true}); code != http.StatusBadRequest || !strings.Contains(body, "HTTPS server") {
		t.Errorf("plain HTTP: %d %s", code, body)
	}
}

// junkTokens sends many different tokens from one source. Few of them reach the API server.
func (w *testbed) junkTokens(t *testing.T) {
	w.reviewed()
	before := w.count(httpserver.FailureRate)
	c := from("127.0.0.5")
	c.Transport.(*http.Transport).DisableKeepAlives = false
	begin := time.Now()
	var limited int
	for i := range 150 {
		code, body, err := w.do(c, bearer(fmt.Sprintf("junk.%d.x", i), "/metrics"))
		switch {
		case code == http.StatusTooManyRequests:
			limited++
		case code != http.StatusUnauthorized:
			t.Fatalf("junk gets %d %s, %v", code, body, err)
		}
	}
	allowed := 10 + int(time.Since(begin).Seconds()/5) + 1
	if n := w.reviewed(); n > allowed+2+int(time.Since(begin).Minutes()) || limited < 150-allowed {
		t.Errorf("150 tokens of junk caused %d reviews, and %d were refused without one; want %d reviews at most", n, limited, allowed)
	}
	if n := w.count(httpserver.FailureRate) - before; n != uint64(limited) {
		t.Errorf("%d refusals were counted, want %d", n, limited)
	}
	if code, _, _ := w.do(c, request{path: "/healthz"}); code != http.StatusOK {
		t.Errorf("the probe of the same source answers %d", code)
	}
}

// connections holds more connections than there may be, from many sources.
func (w *testbed) connections(t *testing.T) {
	at := strings.TrimPrefix(w.url, "https://")
	before := w.count("evicted") + w.count("source_connections")
	for source := range 12 {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(source+1))}}
		for range 34 {
			c, err := d.DialContext(t.Context(), "tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}
	}
	if w.count("evicted")+w.count("source_connections") == before {
		t.Error("no connection was refused")
	}
}

// slowClients sends half a request. The server closes the connection.
func (w *testbed) slowClients(t *testing.T) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 2, 1)}}
	c, err := tls.DialWithDialer(&d, "tcp", strings.TrimPrefix(w.url, "https://"), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET /metrics HTTP/1.1\r\nHost: a\r\nX-A: "); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	var late net.Error
	if _, err := io.Copy(io.Discard, c); errors.As(err, &late) && late.Timeout() {
		t.Error("half a header keeps its connection")
	}
}

// count returns how many requests and connections were refused for a reason.
func (w *testbed) count(reason string) uint64 {
	return w.server.Metrics().(*httpserver.Listener).Refused.Count(reason)
}

// The API server forwards the observer's token to a pod that serves HTTPS, and keeps the user's own. That is how isthmusctl asks.
func TestThroughAPIServer(t *testing.T) {
	address := ownAddress(t)
	w := newTestbedAt(t, address)
	host, port, err := net.SplitHostPort(strings.TrimPrefix(w.url, "https://"))
	if err != nil {
		t.Fatal(err)
	}
	pods := w.admin.CoreV1().Pods(namespace)
	pod, err := pods.Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "agent"}, Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: host, PodIPs: []corev1.PodIP{{IP: host}}}
	if _, err := pods.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	get := func(token string) (string, error) {
		body, err := w.admin.CoreV1().RESTClient().Get().Namespace(namespace).Resource("pods").SubResource("proxy").Name("https:agent:"+port).
			Suffix("/status").SetHeader(status.TokenHeader, token).DoRaw(t.Context())
		return string(body), err
	}
	if body, err := get(w.token(status.ObserverAccount, status.TokenAudience, status.ControllerAudience)); err != nil || body != "secret" {
		t.Errorf("with the observer's token: %s, %v", body, err)
	}
	if body, err := get(w.token("tenant", status.TokenAudience)); !apierrors.IsForbidden(err) {
		t.Errorf("with a tenant's token: %s, %v", body, err)
	}
	if body, err := get(""); !apierrors.IsUnauthorized(err) { // although an administrator asks
		t.Errorf("without a token: %s, %v", body, err)
	}
}

// ownAddress returns an address of this machine that an API server accepts as a pod's. No packet to it leaves the machine.
func ownAddress(t *testing.T) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Skip("needs a machine with an address besides loopback: an API server forwards to no other")
	return ""
}

// Decisions are cached: an account that loses its right loses access soon, and one that had access keeps it while the API server is
// away.
func TestCache(t *testing.T) {
	w := newTestbed(t)
	own := rest.CopyConfig(w.config)
	writes := apitest.CountWrites(own)
	v, err := New(own, status.TokenAudience)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	v.now = func() time.Time { return now }
	token := w.token("prometheus")
	server := httpserver.New(httpserver.Config{Access: v, Log: slog.New(slog.DiscardHandler)})
	server.Handle("/metrics", http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	request := func() *answer {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		a := &answer{header: http.Header{}, code: http.StatusOK}
		server.ServeHTTP(a, r)
		return a
	}
	ask := func(want int) {
		t.Helper()
		if a := request(); a.code != want {
			t.Errorf("answers %d %s, want %d", a.code, a.body.String(), want)
		}
	}
	sent := func(want int) {
		t.Helper()
		if have := writes.Take(); len(have) != want {
			t.Errorf("it sent %q, want %d requests", have, want)
		}
	}
	ask(http.StatusOK)
	sent(2)
	ask(http.StatusOK)
	sent(0)
	now = now.Add(allowFor + time.Second)
	ask(http.StatusOK)
	sent(2)
	// The API server is away.
	there := v.tokens
	dead, err := New(&rest.Config{Host: "https://127.0.0.1:1"}, status.TokenAudience)
	if err != nil {
		t.Fatal(err)
	}
	now = now.Add(allowFor + time.Second)
	v.tokens = dead.tokens
	ask(http.StatusOK)
	v.tokens = there
	if err := w.admin.RbacV1().ClusterRoleBindings().Delete(t.Context(), "metrics-reader", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// The API server's own authorizer notices within milliseconds.
	for end := time.Now().Add(20 * time.Second); ; <-time.After(50 * time.Millisecond) {
		if request().code == http.StatusForbidden {
			break
		}
		now = now.Add(allowFor + time.Second)
		if time.Now().After(end) {
			t.Fatal("an account without the right keeps its access")
		}
	}
	writes.Take()
	ask(http.StatusForbidden)
	sent(0)
	v.tokens = dead.tokens
	v.denied.RemoveAll(func(any) bool { return true })
	ask(http.StatusServiceUnavailable)
}

// answer is an http.ResponseWriter.
type answer struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }
