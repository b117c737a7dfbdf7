package apitest

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// LastingToken returns a token of account that does not expire, as the controller of Kubernetes puts it into a Secret of type
// service-account-token. The server accepts it while Secret secret has it.
func (s *Server) LastingToken(t testing.TB, account *corev1.ServiceAccount, secret string) string {
	t.Helper()
	Require(t)
	text, err := s.loan.ServiceAccountKey()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "kubernetes.io/serviceaccount/"
	claims, err := json.Marshal(map[string]string{
		"iss": "kubernetes/serviceaccount", "sub": "system:serviceaccount:" + account.Namespace + ":" + account.Name,
		prefix + "namespace": account.Namespace, prefix + "secret.name": secret,
		prefix + "service-account.name": account.Name, prefix + "service-account.uid": string(account.UID),
	})
	if err != nil {
		t.Fatal(err)
	}
	encode := base64.RawURLEncoding.EncodeToString
	signed := encode([]byte(`{"alg":"ES256"}`)) + "." + encode(claims)
	digest := sha256.Sum256([]byte(signed))
	r, v, err := ecdsa.Sign(rand.Reader, key.(*ecdsa.PrivateKey), digest[:])
	if err != nil {
		t.Fatal(err)
	}
	return signed + "." + encode(append(r.FillBytes(make([]byte, 32)), v.FillBytes(make([]byte, 32))...))
}
