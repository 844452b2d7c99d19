"""Two commands at home: a host trains and invites, guests join it.

`send_data` copies the data to guests, `server` and `client` exchange signed messages, `rendezvous`
runs torch's elastic agent, and `agreement` is what the process that trains on a guest is held to.
"""
