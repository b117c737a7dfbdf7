package credential

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"
)

// Token is what a ServiceAccount's token says about itself. The zero Token is none of a ServiceAccount.
type Token struct {
	Account string // the user name
	Issued  time.Time
	Expires time.Time // zero if it does not expire
	// Secret is the Secret beside the account that holds a token which does not expire.
	Secret string
}

// Parse returns the claims of a token, without a check of its signature: only the API server that issued it can do that.
func Parse(token string) Token {
	parts := strings.Split(strings.TrimSpace(token), ".")
	if len(parts) != 3 {
		return Token{}
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	var claims struct {
		Subject string  `json:"sub"`
		Issued  float64 `json:"iat"`
		Expires float64 `json:"exp"`
		Secret  string  `json:"kubernetes.io/serviceaccount/secret.name"`
	}
	if err != nil || json.Unmarshal(text, &claims) != nil {
		return Token{}
	}
	t := Token{Account: claims.Subject, Secret: claims.Secret}
	if claims.Expires > 0 {
		t.Issued, t.Expires = time.Unix(int64(claims.Issued), 0), time.Unix(int64(claims.Expires), 0)
	}
	return t
}

// Due returns when t is renewed: when half of its life has passed. A token that does not expire is replaced at once.
func (t Token) Due() time.Time {
	return t.Issued.Add(t.Expires.Sub(t.Issued) / 2)
}
