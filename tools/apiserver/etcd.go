package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// Etcd calls a method of the key-value API of the server's etcd, such as "range" or "txn", over HTTP. Fields of type []byte are
// keys and values. A nil response is not read.
func (s *Server) Etcd(ctx context.Context, method string, request, response any) error {
	if err := s.callEtcd(ctx, method, request, response); err != nil {
		return fmt.Errorf("%s in etcd: %w", method, err)
	}
	return nil
}

func (s *Server) callEtcd(ctx context.Context, method string, request, response any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.etcdURL+"/v3/kv/"+method, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s", resp.Status, answer)
	case response == nil:
		return nil
	}
	return json.Unmarshal(answer, response)
}
