// SPDX-License-Identifier: Apache-2.0

package kube

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
	"os"
	"path/filepath"
	"time"
)

// pki is a folder with the keys and certificates of a cluster: what kubeadm has below /etc/kubernetes/pki.
type pki struct {
	dir    string
	ca     *x509.Certificate
	caKey  *ecdsa.PrivateKey
	serial int64
}

// lifetime is that of all certificates: far longer than any test, and soon over.
const lifetime = 24 * time.Hour

// newPKI makes a certificate authority, ca.crt, and the key pair that service account tokens are signed with, sa.key and sa.pub.
func newPKI(dir string) (*pki, error) {
	p := &pki{dir: dir}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of a cluster's CA: %w", err)
	}
	p.caKey = key
	p.ca = p.template("redirector-test-ca", nil)
	p.ca.IsCA, p.ca.BasicConstraintsValid = true, true
	p.ca.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, p.ca, p.ca, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate of a cluster's CA: %w", err)
	}
	tokens, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key for tokens: %w", err)
	}
	public, err := x509.MarshalPKIXPublicKey(tokens.Public())
	if err != nil {
		return nil, fmt.Errorf("make the key for tokens: %w", err)
	}
	return p, errors.Join(
		p.write("ca.crt", "CERTIFICATE", der),
		p.writeKey("sa.key", tokens),
		p.write("sa.pub", "PUBLIC KEY", public),
	)
}

func (p *pki) template(name string, groups []string) *x509.Certificate {
	p.serial++
	return &x509.Certificate{
		SerialNumber: big.NewInt(p.serial),
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		NotBefore:    time.Now().Add(-time.Minute),
		NotAfter:     time.Now().Add(lifetime),
	}
}

// leaf makes file.crt and file.key: a certificate for a server at the addresses and for a client that the API server takes for the
// user of that name, in the groups.
func (p *pki) leaf(file, name string, groups []string, ips ...net.IP) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make a key for %s: %w", name, err)
	}
	template := p.template(name, groups)
	template.IPAddresses, template.DNSNames = ips, []string{"localhost"}
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.CreateCertificate(rand.Reader, template, p.ca, key.Public(), p.caKey)
	if err != nil {
		return fmt.Errorf("make a certificate for %s: %w", name, err)
	}
	return errors.Join(p.write(file+".crt", "CERTIFICATE", der), p.writeKey(file+".key", key))
}

func (p *pki) writeKey(file string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode key %s: %w", file, err)
	}
	return p.write(file, "PRIVATE KEY", der)
}

func (p *pki) write(file, kind string, der []byte) error {
	return os.WriteFile(p.path(file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

func (p *pki) path(file string) string { return filepath.Join(p.dir, file) }
