package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/isthmus-net/isthmus/tools/netlab"
)

// TestAgainstAPIServer runs testdata/server/*.txtar against a real API server, empty at the start of each:
// the kubeconfig "admin" reaches it as an administrator, its context "nobody" without rights.
func TestAgainstAPIServer(t *testing.T) {
	if os.Getenv("KUBEBUILDER_ASSETS") == "" {
		const why = "KUBEBUILDER_ASSETS does not name a directory with kube-apiserver and etcd; run make test, which builds them"
		netlab.Skip(t, why)
	}
	testscript.Run(t, testscript.Params{Dir: filepath.Join("testdata", "server"), Setup: startServer})
}

func startServer(script *testscript.Env) error {
	server := &envtest.Environment{}
	cfg, err := server.Start()
	if err != nil {
		return err
	}
	if err := awaitServiceCIDR(cfg); err != nil {
		return errors.Join(err, server.Stop())
	}
	ctx, cancel := context.WithCancel(context.Background())
	issued := make(chan error, 1)
	go func() { issued <- issueTokens(ctx, cfg) }()
	script.Defer(func() {
		cancel()
		if err := errors.Join(<-issued, server.Stop()); err != nil {
			script.T().Fatal(err)
		}
	})
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: cfg.Host, CertificateAuthorityData: cfg.CAData}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{
			"admin":  {ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData},
			"nobody": {ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Impersonate: "nobody"},
		},
		Contexts: map[string]*clientcmdapi.Context{
			"admin": {Cluster: "c", AuthInfo: "admin"}, "nobody": {Cluster: "c", AuthInfo: "nobody"},
		},
		CurrentContext: "admin",
	}, filepath.Join(script.WorkDir, "admin"))
}

// awaitServiceCIDR waits for what an API server makes soon after its start.
func awaitServiceCIDR(cfg *rest.Config) error {
	c, err := connect(rest.CopyConfig(cfg))
	if err != nil {
		return err
	}
	return wait.PollUntilContextTimeout(context.Background(), 50*time.Millisecond, 30*time.Second, true, func(ctx context.Context) (bool, error) {
		services := &networkingv1.ServiceCIDRList{}
		err := c.List(ctx, services)
		return len(services.Items) > 0, err
	})
}

// issueTokens plays the controller that puts tokens into Secrets, until ctx is done. The tokens are real.
func issueTokens(ctx context.Context, cfg *rest.Config) error {
	c, err := connect(rest.CopyConfig(cfg))
	if err != nil {
		return err
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		secrets := &corev1.SecretList{}
		if err := c.List(ctx, secrets); err != nil {
			continue // at the end
		}
		for _, s := range secrets.Items {
			if s.Type != corev1.SecretTypeServiceAccountToken || len(s.Data) > 0 {
				continue
			}
			request := &authenticationv1.TokenRequest{}
			account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Annotations[corev1.ServiceAccountNameKey]}}
			if err := c.SubResource("token").Create(ctx, account, request); err != nil {
				return err
			}
			s.Data = map[string][]byte{corev1.ServiceAccountTokenKey: []byte(request.Status.Token)}
			if err := c.Update(ctx, &s); client.IgnoreNotFound(err) != nil {
				return err
			}
		}
	}
}
