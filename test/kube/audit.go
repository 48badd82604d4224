// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
)

// auditPolicy has the API server log each of the agent's requests, and nobody else's. That of a watch is logged when it is
// answered, and again when it ends.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [` + agentUser + `]
- level: None
`

// Request is a request of the agent's, as the API server has seen it.
type Request struct {
	// Verb is that of RBAC: get, list, watch, patch, create.
	Verb string
	// Resource is the plural name, with the subresource behind a slash: "pods/status".
	Resource string
	// Namespace and Name are those of the object, empty for a collection.
	Namespace, Name string
	// URI has the selectors, in the query.
	URI string
	// Code is the HTTP status of the answer.
	Code int
}

func (c *Cluster) auditLog() string { return c.path("audit.log") }

// Requests returns all requests of the agent's that have been answered, in the order in which they were.
func (c *Cluster) Requests() []Request {
	c.tb.Helper()
	data, err := os.ReadFile(c.auditLog())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		c.tb.Fatal(err)
	}
	var requests []Request
	index := map[string]int{}
	for line := range bytes.Lines(data) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // it is being written
		}
		var event struct {
			AuditID    string `json:"auditID"`
			Verb       string `json:"verb"`
			RequestURI string `json:"requestURI"`
			Object     struct {
				Resource    string `json:"resource"`
				Subresource string `json:"subresource"`
				Namespace   string `json:"namespace"`
				Name        string `json:"name"`
			} `json:"objectRef"`
			Response struct {
				Code int `json:"code"`
			} `json:"responseStatus"`
		}
		if err := json.Unmarshal(line, &event); err != nil {
			c.tb.Fatalf("the audit log has the line %q: %v", line, err)
		}
		r := Request{
			Verb:      event.Verb,
			Resource:  event.Object.Resource,
			Namespace: event.Object.Namespace,
			Name:      event.Object.Name,
			URI:       event.RequestURI,
			Code:      event.Response.Code,
		}
		if event.Object.Subresource != "" {
			r.Resource += "/" + event.Object.Subresource
		}
		if i, ok := index[event.AuditID]; ok {
			requests[i] = r
			continue
		}
		index[event.AuditID] = len(requests)
		requests = append(requests, r)
	}
	return requests
}

// Count returns how many of the requests have the verb and the resource.
func Count(requests []Request, verb, resource string) int {
	n := 0
	for _, r := range requests {
		if r.Verb == verb && r.Resource == resource {
			n++
		}
	}
	return n
}
