// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/redirector-dataplane/redirector/pkg/api"
)

// whyNone says what is wrong with the node, which may be why a pod is not enrolled; nil if nothing is known.
func whyNone(ctx context.Context, agent *api.Client) error {
	status, err := agent.Status(ctx)
	if err != nil {
		return nil //nolint:nilerr // what is asked for is known without
	}
	for _, w := range status.Warnings {
		if w.UID == "" && w.Severity == api.Red {
			return fmt.Errorf("that may be why: %s: %s", w.Message, w.Remedy)
		}
	}
	return nil
}

// findPod returns the UID of the enrolled pod that somebody means: by UID, by NAMESPACE/NAME, or by a name that one pod alone has.
func findPod(ctx context.Context, agent *api.Client, who string) (uid string, err error) {
	pods, err := agent.Pods(ctx)
	if err != nil {
		return "", err
	}
	var named []string
	for i := range pods {
		p := &pods[i]
		switch who {
		case p.UID, p.String():
			return p.UID, nil
		case p.Name:
			named, uid = append(named, p.String()), p.UID
		}
	}
	switch len(named) {
	case 0:
		err := fmt.Errorf("no enrolled pod is called %s: `redirector pods` lists them; one that is not there is not captured", who)
		return "", errors.Join(err, whyNone(ctx, agent))
	case 1:
		return uid, nil
	default:
		return "", fmt.Errorf("there is more than one pod called %s: name one of %s", who, strings.Join(named, ", "))
	}
}
