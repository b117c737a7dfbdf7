// Package pki makes the certificates and kubeconfigs of one cluster: a CA of its own,
// elliptic keys, ten years, no file rewritten when present.
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
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/isthmus-net/isthmus/tools/lab/topology"
)

const lifetime = 10 * 365 * 24 * time.Hour

// Names of the files Write leaves in its directory, besides <user>.kubeconfig.
const (
	CA                = "ca.crt"
	CAKey             = "ca.key"
	APIServer         = "apiserver"         // .crt, .key
	APIServerKubelet  = "apiserver-kubelet" // .crt, .key: the API server as a kubelet's client
	FrontProxy        = "front-proxy"       // .crt, .key
	ServiceAccount    = "sa.pub"
	ServiceAccountKey = "sa.key"
)

// Users with a kubeconfig, <user>.kubeconfig.
const (
	Admin             = "admin"
	ControllerManager = "kube-controller-manager"
	Scheduler         = "kube-scheduler"
	KubeProxy         = "kube-proxy"
)

// done is written last: with it, everything is there.
const done = ".done"

// Kubelet is the user of a node's kubelet.
func Kubelet(node string) string { return "kubelet-" + node }

// Kubeconfig is the file of a user in dir.
func Kubeconfig(dir, user string) string { return filepath.Join(dir, user+".kubeconfig") }

// Write makes all files of a cluster in dir, unless an earlier call did.
func Write(dir string, c topology.Cluster) error {
	if _, err := os.Stat(filepath.Join(dir, done)); err == nil {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	ca, err := newAuthority(dir, c)
	if err != nil {
		return fmt.Errorf("certificate authority of %s: %w", c.Name, err)
	}
	api := c.Machine()
	errs := []error{
		writeServiceAccountKey(dir),
		ca.pair(APIServer, pkix.Name{CommonName: "kube-apiserver"},
			[]string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"},
			[]netip.Addr{netip.MustParseAddr("127.0.0.1"), c.KubernetesServiceIP(), api.IPv4, api.IPv6}),
		ca.pair(APIServerKubelet, pkix.Name{CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}}, nil, nil),
		ca.pair(FrontProxy, pkix.Name{CommonName: "front-proxy-client"}, nil, nil),
		ca.kubeconfig(Admin, pkix.Name{CommonName: "lab-admin", Organization: []string{"system:masters"}}),
		ca.kubeconfig(ControllerManager, pkix.Name{CommonName: "system:kube-controller-manager"}),
		ca.kubeconfig(Scheduler, pkix.Name{CommonName: "system:kube-scheduler"}),
		ca.kubeconfig(KubeProxy, pkix.Name{CommonName: "system:kube-proxy"}),
	}
	for _, n := range c.Nodes {
		errs = append(errs, ca.kubeconfig(Kubelet(n.Name), pkix.Name{CommonName: "system:node:" + n.Name, Organization: []string{"system:nodes"}}))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("certificates of %s: %w", c.Name, err)
	}
	return os.WriteFile(filepath.Join(dir, done), nil, 0o600)
}

type authority struct {
	dir     string
	cluster topology.Cluster
	cert    *x509.Certificate
	certPEM []byte
	key     *ecdsa.PrivateKey
}

func newAuthority(dir string, c topology.Cluster) (*authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "lab-ca-" + c.Name},
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature | x509.KeyUsageCRLSign,
	}
	der, err := sign(template, template, key, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, cluster: c, cert: cert, certPEM: encode("CERTIFICATE", der), key: key}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	return a, errors.Join(
		os.WriteFile(filepath.Join(dir, CA), a.certPEM, 0o644),
		os.WriteFile(filepath.Join(dir, CAKey), keyPEM, 0o600))
}

// issue returns a certificate for client and server use and its key, both PEM.
func (a *authority) issue(subject pkix.Name, names []string, addrs []netip.Addr) (cert, key []byte, err error) {
	private, err := newKey()
	if err != nil {
		return nil, nil, err
	}
	template := &x509.Certificate{
		Subject:     subject,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    names,
	}
	for _, addr := range addrs {
		template.IPAddresses = append(template.IPAddresses, net.IP(addr.AsSlice()))
	}
	der, err := sign(template, a.cert, private, a.key)
	if err != nil {
		return nil, nil, err
	}
	key, err = encodeKey(private)
	return encode("CERTIFICATE", der), key, err
}

func (a *authority) pair(name string, subject pkix.Name, names []string, addrs []netip.Addr) error {
	cert, key, err := a.issue(subject, names, addrs)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(a.dir, name+".crt"), cert, 0o644),
		os.WriteFile(filepath.Join(a.dir, name+".key"), key, 0o600))
}

func (a *authority) kubeconfig(user string, subject pkix.Name) error {
	cert, key, err := a.issue(subject, nil, nil)
	if err != nil {
		return err
	}
	// Named by cluster too, so that KUBECONFIG may list those of several clusters.
	who := user + "-" + a.cluster.Name
	c := clientcmdapi.NewConfig()
	c.Clusters[a.cluster.Name] = &clientcmdapi.Cluster{Server: a.cluster.Server(), CertificateAuthorityData: a.certPEM}
	c.AuthInfos[who] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	c.Contexts[a.cluster.Name] = &clientcmdapi.Context{Cluster: a.cluster.Name, AuthInfo: who}
	c.CurrentContext = a.cluster.Name
	return clientcmd.WriteToFile(*c, Kubeconfig(a.dir, user))
}

func writeServiceAccountKey(dir string) error {
	key, err := newKey()
	if err != nil {
		return err
	}
	private, err := encodeKey(key)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, ServiceAccountKey), private, 0o600),
		os.WriteFile(filepath.Join(dir, ServiceAccount), encode("PUBLIC KEY", public), 0o644))
}

func newKey() (*ecdsa.PrivateKey, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

// sign fills in what all our certificates share.
func sign(template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial
	template.NotBefore = time.Now().Add(-time.Hour) // clocks of one machine, but be kind
	template.NotAfter = template.NotBefore.Add(lifetime)
	return x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return encode("EC PRIVATE KEY", der), nil
}
