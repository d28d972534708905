# nginx with a page, a word, the payload, and a page that is done when it has fetched all of these. $1: more of its
# `listen`.
cp "$PAYLOAD" payload
echo "$WORD" > word
echo "<html><head><title>a page</title></head><body><p>$WORD</p></body></html>" > index.html
cat > fetches.html <<END
<html><body><p id="found">nothing</p><script>
const fetches = [...Array(12).keys()].map(n => fetch("payload?" + n).then(answer => answer.arrayBuffer()));
Promise.all([fetch("word").then(answer => answer.text()), ...fetches]).then(([word, ...all]) => {
    const sizes = new Set(all.map(one => one.byteLength));
    document.getElementById("found").innerText = word.trim() + ": " + all.length + " of " + [...sizes];
});
</script></body></html>
END
cat > nginx.conf <<END
user root root; daemon off; master_process off; pid $PWD/nginx.pid;
events { worker_connections 1024; }
http {
    access_log off; types { text/html html; } default_type application/octet-stream;
    client_body_temp_path $PWD/t1; proxy_temp_path $PWD/t2; fastcgi_temp_path $PWD/t3;
    uwsgi_temp_path $PWD/t4; scgi_temp_path $PWD/t5;
    server { listen 0.0.0.0:$PORT ${1-}; root $PWD; }
}
END
exec nginx -e stderr -c "$PWD/nginx.conf"
