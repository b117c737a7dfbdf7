// Package pki writes the certificates, keys and kubeconfigs of a Kubernetes cluster into a folder. One authority per cluster
// signs all of them: that of [certs], the product's own. This package adds what only Kubernetes needs: users as subjects,
// server addresses, the key pair of ServiceAccounts, and kubeconfigs.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/isthmus-net/isthmus/gateway/certs"
)

// Files of a folder. A certificate and its key are NAME.crt and NAME.key.
const (
	CA                = "ca.crt"
	CAKey             = "ca.key"
	Server            = "apiserver"
	ServiceAccount    = "sa.pub"
	ServiceAccountKey = "sa.key"
)

// Masters is the group whose members may do everything.
const Masters = "system:masters"

const lifetime = 10 * 365 * 24 * time.Hour

// File is a file in the folder dir.
func File(dir, name string) string { return filepath.Join(dir, name) }

// Kubeconfig is the kubeconfig of a user in the folder dir.
func Kubeconfig(dir, user string) string { return filepath.Join(dir, user+".kubeconfig") }

// Authority signs the certificates of one cluster.
type Authority struct {
	dir string
	ca  *certs.Authority
	now time.Time
}

// New writes a new authority, called name, and the key pair of ServiceAccounts into the folder dir.
func New(dir, name string) (*Authority, error) {
	now := time.Now()
	ca, err := certs.NewAuthority(name, now)
	if err != nil {
		return nil, fmt.Errorf("certificate authority %s: %w", name, err)
	}
	return &Authority{dir, ca, now}, errors.Join(
		os.WriteFile(File(dir, CA), ca.Cert, 0o644),
		os.WriteFile(File(dir, CAKey), ca.Key, 0o600),
		writeServiceAccountKey(dir),
	)
}

// CertPEM is the authority's certificate.
func (a *Authority) CertPEM() []byte { return a.ca.Cert }

// ServerNames are the names under which pods and the machine itself reach an API server.
var ServerNames = []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"}

// WriteServer writes the API server's certificate, for [ServerNames] and for addresses.
func (a *Authority) WriteServer(addresses ...netip.Addr) error {
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "kube-apiserver"}, DNSNames: ServerNames}
	for _, addr := range addresses {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	p, err := a.sign(template)
	if err != nil {
		return err
	}
	return a.writePair(Server, p)
}

// WriteClient writes a client certificate of a user, as NAME.crt and NAME.key.
func (a *Authority) WriteClient(name, user string, groups ...string) error {
	p, err := a.Client(user, groups...)
	if err != nil {
		return err
	}
	return a.writePair(name, p)
}

// WriteKubeconfig writes NAME.kubeconfig: a user, in groups, of a cluster whose API server is at the URL server.
// Its entries are named by cluster, so that KUBECONFIG may list the files of several clusters.
func (a *Authority) WriteKubeconfig(name, cluster, server, user string, groups ...string) error {
	p, err := a.Client(user, groups...)
	if err != nil {
		return err
	}
	entry := name + "-" + cluster
	c := clientcmdapi.NewConfig()
	c.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: a.ca.Cert}
	c.AuthInfos[entry] = &clientcmdapi.AuthInfo{ClientCertificateData: p.Cert, ClientKeyData: p.Key}
	c.Contexts[cluster] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: entry}
	c.CurrentContext = cluster
	return clientcmd.WriteToFile(*c, Kubeconfig(a.dir, name))
}

// Client returns a client certificate of a user who is in groups.
func (a *Authority) Client(user string, groups ...string) (certs.Pair, error) {
	return a.sign(&x509.Certificate{Subject: pkix.Name{CommonName: user, Organization: groups}})
}

func (a *Authority) sign(template *x509.Certificate) (certs.Pair, error) {
	template.KeyUsage = x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment
	return a.ca.Sign(template, a.now, lifetime)
}

func (a *Authority) writePair(name string, p certs.Pair) error {
	return errors.Join(
		os.WriteFile(File(a.dir, name+".crt"), p.Cert, 0o644),
		os.WriteFile(File(a.dir, name+".key"), p.Key, 0o600),
	)
}

func writeServiceAccountKey(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(File(dir, ServiceAccountKey), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600),
		os.WriteFile(File(dir, ServiceAccount), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o644),
	)
}
