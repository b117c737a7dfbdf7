package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/cmd/internal/httpserver"
	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/controlplane/api/crds"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/broker/membership"
	"github.com/isthmus-net/isthmus/controlplane/federation"
	"github.com/isthmus-net/isthmus/tools/apitest"
)

// TestStart follows a cluster that joins: without a registration the controller ends with an error; with one and a broker
// that is away it runs, is healthy, and reports why it is not ready.
func TestStart(t *testing.T) {
	cfg := apitest.StartEmpty(t)
	token = cfg.BearerToken
	broker := unusedAddress(t)
	s := settings{
		kubeconfig:       kubeconfig(t, &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}, &clientcmdapi.AuthInfo{Token: cfg.BearerToken}, ""),
		brokerKubeconfig: kubeconfig(t, &clientcmdapi.Cluster{Server: "http://" + broker}, &clientcmdapi.AuthInfo{Token: "t"}, "isthmus-broker"),
		namespace:        "isthmus-system", listen: unusedAddress(t), logFormat: "text", logLevel: slog.LevelError,
		federation: true, // without a Federation, which does not affect readiness
	}
	s.broker.TimeScale = 1
	refused := func(want string) {
		t.Helper()
		if err := run(t.Context(), s, io.Discard); err == nil || err.Error() != want {
			t.Errorf("run returns %v, want %s", err, want)
		}
	}
	refused("API server " + cfg.Host + " has no Member kind, so this cluster has not joined; run isthmusctl join")

	all, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := envtest.InstallCRDs(cfg, envtest.CRDInstallOptions{CRDs: all}); err != nil {
		t.Fatal(err)
	}
	refused("namespace isthmus-system has no Member, so this cluster has not joined; run isthmusctl join")

	scheme, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	a, b := member("a"), member("b")
	for _, obj := range []client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "isthmus-system"}}, a, b} {
		if err := c.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	refused("namespace isthmus-system has 2 Members (a, b) and needs exactly one; delete all but this cluster's own")
	if err := c.Delete(t.Context(), b); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, s, io.Discard) }()
	want := "broker http://" + broker + ", namespace isthmus-broker, does not answer; check its address and the network"
	await(t, ended, func() bool {
		code, body := get(s.listen, "/readyz")
		return code == http.StatusServiceUnavailable && strings.HasPrefix(body, want)
	})
	if code, body := get(s.listen, "/healthz"); code != http.StatusOK {
		t.Errorf("it is not healthy while the broker is away: %d %s", code, body)
	}
	for path, administrator := range map[string]string{status.Path: token, "/metrics": token} {
		token = ""
		if code, body := get(s.listen, path); code != http.StatusUnauthorized {
			t.Errorf("without a token %s answers %d %s", path, code, body)
		}
		token = administrator
	}
	var current status.Controller
	var body string
	await(t, ended, func() bool {
		current = status.Controller{}
		_, body = get(s.listen, status.Path)
		err = json.Unmarshal([]byte(body), &current)
		return err != nil || current.Federation != nil && current.Federation.Problem == federation.NotFormed
	})
	if err != nil || current.Ready || current.Broker.Reachable || current.Cluster != "a" || len(current.Waiting) != 1 || !strings.HasPrefix(current.Waiting[0], want) {
		t.Errorf("the status is %s (%v)", body, err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("run returns %v after a cancel", err)
	}
}

// TestQuotaController starts the quota controller of a broker: while the namespace is none it is healthy, and says what is missing;
// with a ClusterSetConfig it is ready.
func TestQuotaController(t *testing.T) {
	cfg := apitest.StartEmpty(t)
	token = cfg.BearerToken
	all, err := crds.All()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := envtest.InstallCRDs(cfg, envtest.CRDInstallOptions{CRDs: all}); err != nil {
		t.Fatal(err)
	}
	scheme, err := membership.NewScheme()
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	const namespace = "isthmus-broker"
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		t.Fatal(err)
	}
	s := settings{
		kubeconfig: kubeconfig(t, &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}, &clientcmdapi.AuthInfo{Token: cfg.BearerToken}, ""),
		namespace:  namespace, listen: unusedAddress(t), logFormat: "text", logLevel: slog.LevelError, quotaController: true,
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, s, io.Discard) }()
	await(t, ended, func() bool {
		code, body := get(s.listen, "/readyz")
		return code == http.StatusServiceUnavailable && strings.HasPrefix(body, "namespace isthmus-broker has no ClusterSetConfig, so it is not a broker; run isthmusctl deploy-broker")
	})
	if code, body := get(s.listen, "/healthz"); code != http.StatusOK {
		t.Errorf("it is not healthy: %d %s", code, body)
	}
	config := &v1alpha1.ClusterSetConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: v1alpha1.ClusterSetConfigName},
		Spec:       v1alpha1.ClusterSetConfigSpec{ClusterSetID: "test", Members: []v1alpha1.MemberBlocks{{ClusterID: "a"}}},
	}
	if err := c.Create(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	await(t, ended, func() bool {
		code, _ := get(s.listen, "/readyz")
		_, metrics := get(s.listen, "/metrics")
		return code == http.StatusOK && strings.Contains(metrics, `isthmus_controller_stored_limit{cluster="a",kind="storageBytes"} 2.68435456e+08`)
	})
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("run returns %v after a cancel", err)
	}
}

func member(id string) *v1alpha1.Member {
	return &v1alpha1.Member{
		ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-system", Name: id},
		Spec: v1alpha1.MemberSpec{
			ClusterID: id, ClusterSetID: "clusterset", ClusterSetIPEnabled: true, ClusterSetIPCIDR: []string{"243.0.0.0/16"}, JoinTime: metav1.Now(),
		},
	}
}

// kubeconfig writes one to a file that lasts as long as the test, and returns its path.
func kubeconfig(t *testing.T, cluster *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo, namespace string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": cluster}, AuthInfos: map[string]*clientcmdapi.AuthInfo{"u": user},
		Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u", Namespace: namespace}}, CurrentContext: "c",
	}, path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// unusedAddress returns an address of this machine without a listener.
func unusedAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// token is what get sends, that of an administrator.
var token string

// get asks for a page. Without an answer, code is 0.
func get(address, path string) (code int, body string) {
	request, err := http.NewRequest(http.MethodGet, "https://"+address+path, http.NoBody)
	if err != nil {
		return 0, err.Error()
	}
	request.Header.Set("Authorization", "Bearer "+token)
	resp, err := httpserver.LocalClient().Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err.Error()
	}
	return resp.StatusCode, string(text)
}

// await asks until done says so. It fails the test when that takes too long or the controller ends.
func await(t *testing.T, ended <-chan error, done func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	late := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("the controller ended: %v", err)
		case <-late:
			t.Fatal("it took too long")
		}
	}
}
